"""Offers the exec interface to connections: sessions, dispatch, push. Knows wire, transport and runtime."""
