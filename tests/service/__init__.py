"""Tests of the session service."""
