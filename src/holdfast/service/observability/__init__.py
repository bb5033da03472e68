"""Metrics, logs and traces of the session service."""
