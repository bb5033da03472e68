"""Inspect's self-check of sandbox providers over pods, by the pytest of Inspect's own environment."""

from __future__ import annotations

import pytest

from tests.support.inspect_root import inspect_root
from tests.support.integrations import SUITES, interpreter, run_suite
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster


def test_the_self_check_of_providers(cluster: Cluster) -> None:
    python = interpreter("inspect")
    if python is None:
        pytest.skip("no environment for inspect: make integrations ONLY=inspect")
    home = cluster.directory / "images"
    root = inspect_root(home / "inspect")
    cluster.load(images.archive(root, images.INSPECT, home / "inspect.tar", ("/bin/bash",)))

    summary, output = run_suite(python, SUITES / "inspect" / "pods_self_check.py")

    assert summary == "88 passed", output
