"""Kinds of sandboxes, and the installation of the server in them. Imported on the host only."""
