"""How to reach a sandbox and put the server inside; imported on the host alone."""
