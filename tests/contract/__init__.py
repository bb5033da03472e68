"""One suite over every way to reach a process: in this program, Unix socket, stdio, WebSocket; JSON and MessagePack."""
