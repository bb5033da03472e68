"""Sessions in their sandboxes: connections, confinement, the two kinds of backends."""
