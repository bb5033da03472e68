"""Which callers are admitted, and how often they may call."""
