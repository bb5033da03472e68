"""`holdfast serve` before the server runs: the state of the garbage collector."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from holdfast import config
from holdfast.cli.verbs.inside import serve
from holdfast.errors import InvalidParams
from holdfast.server import app


def test_the_collector_is_off_for_the_imports_and_on_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    frozen = gc.get_freeze_count()

    def load_config(*arguments: object, **settings: Any) -> config.ExecServerConfig:
        seen.append(gc.isenabled())
        return config.ExecServerConfig()

    def run_server(*arguments: object, **options: object) -> int:
        seen.append(gc.isenabled())
        assert gc.get_freeze_count() > frozen
        return 0

    monkeypatch.setattr(config, "load_config", load_config)
    monkeypatch.setattr(app, "run_server", run_server)
    try:
        assert serve.main(["--listen", "stdio"]) == 0
    finally:
        gc.unfreeze()
    assert seen == [False, True]


def test_the_collector_is_on_again_after_a_refused_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_config(*arguments: object, **settings: Any) -> config.ExecServerConfig:
        raise InvalidParams("no such setting")

    monkeypatch.setattr(config, "load_config", load_config)
    assert serve.main(["--listen", "stdio"]) == 1
    assert gc.isenabled()
