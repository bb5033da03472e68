"""Verbs about the session service."""
