"""Terminals: programs on a PTY, their prompts, keys and state."""
