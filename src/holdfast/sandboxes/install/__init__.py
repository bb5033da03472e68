"""Installs the server in a sandbox: makes, chooses, copies and unpacks the bundle."""
