"""Live shells: programs with a state that persists from command to command."""
