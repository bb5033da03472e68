"""Previews: ports of sessions' sandboxes that browsers reach through the service for some time."""
