"""The port for previews of servers in sandboxes."""
