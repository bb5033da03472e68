"""Putting the server into a sandbox: the bundle, and how it is chosen and unpacked."""
