"""Adapters for other software: what they decide without a sandbox."""
