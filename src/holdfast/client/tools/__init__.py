"""Tools for models: running commands with a yield window."""
