"""The control API of E2B: sandboxes, snapshots and templates, on a fleet."""
