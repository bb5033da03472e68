"""The service's settings: defaults, file, environment and flags, and errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import InvalidParams
from holdfast.service.settings import ServiceSettings, load_settings


def test_the_last_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('max_sessions = 5\nsandbox = "docker:box"\nlease_seconds = 30.0\n')
    environ = {"HOLDFAST_SERVICE_MAX_SESSIONS": "6", "HOLDFAST_SERVICE_ALLOWED_SANDBOXES": "docker:*, ssh:me@host"}
    settings = load_settings(str(file), environ, lease_seconds=20.0, store=None)
    assert (settings.max_sessions, settings.sandbox, settings.lease_seconds) == (6, "docker:box", 20.0)
    assert settings.allowed_sandboxes == ("docker:*", "ssh:me@host")
    assert load_settings(environ={}) == ServiceSettings()


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("max_session = 5", {}, "unknown setting 'max_session'"),
        ("max_sessions = 'many'", {}, "max_sessions"),
        ("max_sessions = 'many'", {}, "service.toml"),
        ("listen_grpc = ''\nlisten_http = ''", {}, "listen_grpc and listen_http"),
        ("max_sessions = -1", {}, "cannot be negative"),
        ("= 3", {}, "settings file"),
        ("tls_cert = 'x'", {}, "tls_cert and tls_key"),
        ("lease_seconds = 0.1", {}, "at least 1"),
        ("", {"HOLDFAST_SERVICE_MAX_SESSIONS": "x"}, "HOLDFAST_SERVICE_MAX_SESSIONS='x'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict[str, str], expected: str) -> None:
    file = tmp_path / "service.toml"
    file.write_text(text)
    with pytest.raises(InvalidParams) as refused:
        load_settings(str(file), environ)
    assert expected in refused.value.message


def test_sandboxes_are_allowed_by_pattern_and_the_default_always() -> None:
    settings = ServiceSettings(sandbox="local", allowed_sandboxes=("docker:agent-*",))
    assert settings.allows_sandbox("local")
    assert settings.allows_sandbox("docker:agent-7")
    assert not settings.allows_sandbox("docker:database")
    assert not settings.allows_sandbox("ssh:root@host")
