"""Verbs on a whole sandbox: copy files, forward ports, run an agent with a bridge to a model."""
