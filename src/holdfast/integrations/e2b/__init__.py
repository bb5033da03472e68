"""A server for the E2B SDKs, on any engine of the fleet; docs/e2b.md."""
