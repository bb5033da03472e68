"""A session in its sandbox: opened, confined, typed into and read."""
