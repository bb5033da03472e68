"""Serves an exec to connections: clients, dispatch, output. Imports wire, transport and runtime."""
