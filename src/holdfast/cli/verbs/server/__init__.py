"""Verbs about the server."""
