"""`BashExecutor`, a client of the session service for callers of a plain executor."""
