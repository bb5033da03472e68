"""Adapters for other software. Each is thin and optional."""
