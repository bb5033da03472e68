"""Verbs that make, list and remove sandboxes."""
