"""The network sides of the session service: gRPC, and HTTP with the Connect protocol."""
