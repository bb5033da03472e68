"""Containers through the HTTP API of Docker's engine on its Unix socket, without the client program."""
