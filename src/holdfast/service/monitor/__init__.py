"""Resource usage of sessions, compared with their limits."""
