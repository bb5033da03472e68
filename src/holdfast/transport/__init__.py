"""Moves messages between two ends: Unix sockets, stdio and WebSocket, for the client and the server alike.

Knows `wire.framing` and asyncio; knows nothing of methods, processes or sessions.
"""
