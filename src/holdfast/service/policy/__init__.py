"""What a session may do: rules from a file, and pure decisions by them."""
