"""Screens and recordings of terminals, drawn from output on the client's side."""
