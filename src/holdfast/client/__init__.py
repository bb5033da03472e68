"""The client: connections that reconnect, and handles on processes, shells, terminals and files. Linux, macOS."""
