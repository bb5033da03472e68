"""Confinement of one process by the operating system: the plan, its application in the child, and the jail outside.

docs/confinement.md is for users. `applying` runs in the child and uses the standard library alone.
"""
