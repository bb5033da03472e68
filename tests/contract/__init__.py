"""One suite over every way to a process: in this program, Unix socket, stdio, WebSocket; JSON and MessagePack."""
