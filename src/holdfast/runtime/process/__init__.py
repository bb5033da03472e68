"""Processes: how they are started, fed with input and signalled."""
