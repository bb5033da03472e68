"""Live shells, whose state persists from command to command."""
