"""Policy of sessions: rules from a file, and pure decisions by them."""
