"""Shared by all test folders; not tests themselves."""
