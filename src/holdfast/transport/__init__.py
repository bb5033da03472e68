"""Channels that carry messages: Unix sockets, stdio and WebSocket, for the client and the server.

Uses `wire.framing` and asyncio, and nothing of methods or processes.
"""
