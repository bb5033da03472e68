"""Confinement of one process by the operating system: what to ask of it, who asks, and what is seen from outside.

docs/confinement.md is for users. `applying` runs in the child and uses the standard library alone.
"""
