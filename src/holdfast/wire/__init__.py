"""The protocol without IO: bytes in, messages out. No asyncio, no sockets, no clocks in this folder."""
