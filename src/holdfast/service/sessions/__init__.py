"""Creates, uses, follows, times and closes sessions. Uses sandboxes through the client."""
