"""The connection of a client to a server."""
