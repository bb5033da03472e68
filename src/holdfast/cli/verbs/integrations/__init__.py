"""Verbs for other software."""
