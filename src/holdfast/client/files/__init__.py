"""Files of a sandbox: single ones, and trees."""
