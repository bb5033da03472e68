"""Verbs that run inside a sandbox for programs there."""
