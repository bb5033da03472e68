"""Sandboxes that the service makes for sessions through `holdfast.fleet`, and removes with them."""
