"""Tests of the session service; a package, so that its conftest is told from the others."""
