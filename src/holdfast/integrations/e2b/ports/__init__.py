"""Ports of a sandbox that clients reach by host name: previews, and the code interpreter."""
