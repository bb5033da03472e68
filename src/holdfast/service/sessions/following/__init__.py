"""Follows sessions: leases, audit rows, events."""
