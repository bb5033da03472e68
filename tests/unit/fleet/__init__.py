"""Templates and records of the fleet."""
