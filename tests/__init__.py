"""Tests of Holdfast, by the kind of parts they run."""
