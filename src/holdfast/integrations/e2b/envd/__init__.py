"""The API of envd, the server that E2B runs in a sandbox: processes, files, watchers."""
