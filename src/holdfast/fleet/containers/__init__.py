"""Sandboxes that Docker and Podman make."""
