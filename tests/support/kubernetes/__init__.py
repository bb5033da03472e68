"""A real Kubernetes for tests: its programs, built once from the module proxy, and a cluster of one node."""
