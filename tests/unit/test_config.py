"""Settings: from file, environment and flags, in this order, and a wrong one is named with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ExecServerConfig, load_config
from holdfast.errors import InvalidParams


def test_the_last_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_connections = 1\nmax_pending_requests = 1\nmax_exited_processes = 1\n")
    environ = {"HOLDFAST_MAX_PENDING_REQUESTS": "2", "HOLDFAST_MAX_EXITED_PROCESSES": "2"}
    config = load_config(str(file), environ, max_exited_processes=3, oom_score_adj=None)
    assert (config.max_connections, config.max_pending_requests, config.max_exited_processes) == (1, 2, 3)
    assert config.oom_score_adj == ExecServerConfig().oom_score_adj


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("HOLDFAST_ALLOW_DIRECT_EXEC", "false", False),
        ("HOLDFAST_ALLOW_DIRECT_EXEC", "0", False),
        ("HOLDFAST_DETACHED_SESSION_SECONDS", "1.5", 1.5),
        ("HOLDFAST_SPOOL_DIRECTORY", "/var/spool", "/var/spool"),
        ("HOLDFAST_MAX_CONNECTIONS", "12", 12),
    ],
)
def test_the_environment_is_read_by_type(variable: str, text: str, value: object) -> None:
    config = load_config(environ={variable: text})
    assert getattr(config, variable.removeprefix("HOLDFAST_").lower()) == value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_connections = 'many'", "max_connections"),
        ("bogus = 1", "'bogus'"),
        ("= 1", "settings.toml"),
        ("max_connections = 1.5", "max_connections"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(InvalidParams, match=named):
        load_config(str(file), {})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidParams, match=r"settings\.toml"):
        load_config(str(file), {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidParams, match="/nowhere/at/all"):
        load_config("/nowhere/at/all", {})


def test_a_wrong_variable_is_named_with_its_value() -> None:
    with pytest.raises(InvalidParams, match=r"HOLDFAST_MAX_CONNECTIONS='many'"):
        load_config(environ={"HOLDFAST_MAX_CONNECTIONS": "many"})


@pytest.mark.parametrize("flags", [{"bogus": 1}, {"max_connections": "many"}])
def test_a_wrong_flag_is_named(flags: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match=next(iter(flags))):
        load_config(environ={}, **flags)


def test_other_variables_are_nobodys_business() -> None:
    assert load_config(environ={"HOLDFAST_TOKEN": "x", "PATH": "/bin"}) == ExecServerConfig()
