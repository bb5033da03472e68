"""`ServiceClient`, a client of the session service over gRPC, and the parts that it shares with `BashExecutor`."""
