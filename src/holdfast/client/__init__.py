"""The caller's half: a connection that comes back by itself, and processes over it. Runs on Linux and macOS."""
