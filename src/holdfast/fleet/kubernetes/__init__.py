"""The engine `kubernetes`: sandboxes that are pods, made through the cluster's API."""
