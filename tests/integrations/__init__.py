"""Suites of other software, each in an environment of its own."""
