"""Verbs about terminals and shells."""
