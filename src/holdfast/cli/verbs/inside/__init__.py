"""Verbs that also run inside sandboxes, with the standard library, msgspec and h11 only; part of the bundle."""
