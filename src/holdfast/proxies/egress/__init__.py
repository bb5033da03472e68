"""The filtering proxy of confined processes."""
