"""Fuzz targets, one for each parser, and what runs them: `python -m fuzz` with atheris, the tests with Hypothesis.

A new target is one function in `fuzz/targets.py`.
"""
