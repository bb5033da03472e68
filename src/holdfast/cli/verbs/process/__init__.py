"""Verbs about processes and files."""
