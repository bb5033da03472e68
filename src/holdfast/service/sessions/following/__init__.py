"""Following sessions: leases, events, and the rows that are written of a session."""
