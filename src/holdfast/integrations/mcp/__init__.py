"""`holdfast mcp`: a server of the Model Context Protocol over sandboxes. Needs the extra `mcp`."""
