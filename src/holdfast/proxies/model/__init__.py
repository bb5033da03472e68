"""The model proxy: HTTP on 127.0.0.1 in a sandbox, answered by a call of the host."""
