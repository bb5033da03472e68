"""How to reach a sandbox from the host, and how to put the server inside. Imported on the host alone."""
