"""`holdfast mcp`: its tools, its transports, the conformance suite and real clients."""
