"""Tests of sandboxes, on real engines."""
