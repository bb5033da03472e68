"""Jails: sandboxes that bubblewrap makes on this machine."""
