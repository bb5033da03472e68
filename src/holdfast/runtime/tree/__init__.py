"""Process trees: found in /proc, ended as a whole, and measured."""
