"""Programs of Holdfast that run inside a sandbox, beside the server."""
