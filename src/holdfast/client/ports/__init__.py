"""Ports of a sandbox on this machine, and the reverse."""
