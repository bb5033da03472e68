"""Tests of sandboxes; a package, so that its conftest is told from the others."""
