"""The command line's parsing of its arguments, without a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import __version__
from holdfast.__main__ import main
from holdfast.cli import VERBS
from holdfast.cli.support.command_request import environment, generated_id
from holdfast.cli.support.exit_codes import exit_code_of
from holdfast.cli.verbs.inside.serve import parser
from holdfast.cli.verbs.process.run import limits
from holdfast.config import ExecServerConfig
from holdfast.errors import CommandNotFound, ConnectionLost, InvalidParams, NotExecutable, TimeoutError
from holdfast.types import Limits


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb, found in VERBS.items():
        assert any(text.split(maxsplit=1) == [verb, found.help] for text in lines), verb


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n"


def test_no_verb_imports_pydantic() -> None:
    """It doubles the time that a verb takes to start; a verb that refuses its arguments has used typer by then."""
    script = "import sys; from holdfast.__main__ import main; main(['kill']); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr[:15]) == ("False\n", "holdfast: kill:")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "holdfast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["fly"], 2, "'fly'"),
        (["kil"], 2, "no verb 'kil'; did you mean `holdfast kill`? `holdfast --help` lists all verbs"),
        (["audit", "check"], 2, "no sub-verb 'check'; sub-verbs: verify"),
        (["exec", "ls"], 2, "holdfast run -- ls"),
        (["exec", "ls", "-l", "a b"], 2, "holdfast run -- ls -l 'a b'"),
        (["ps", "--colour"], 2, "--colour"),
        (["run"], 125, "CMD"),
        (["run", "--timeout", "soon", "true"], 125, "--timeout"),
        (["run", "--detach", "--timeout", "3", "true"], 125, "--timeout"),
        (["run", "--env", "=x", "true"], 125, "'=x'"),
        (["run", "--limit", "luck=1", "true"], 125, "luck"),
        (["kill"], 2, "--all"),
        (["kill", "--all", "one"], 2, "--all"),
        (["kill", "--force", "--signal", "INT", "one"], 2, "--signal"),
        (["exec", "{}", "{}"], 2, "2 arguments"),
        (["exec", " "], 2, "empty"),
        (["connect", "there"], 2, "'there'"),
        (["serve", "--max-connections", "many"], 2, "many"),
        (["serve", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
        (["serve", "--token-file", "/nonexistent"], 1, "/nonexistent"),
        (["serve", "--allow-direct-exec", "perhaps"], 2, "perhaps"),
        (["serve", "--colour"], 2, "--colour. See `holdfast serve --help`"),
        (["egress", "--colour"], 2, "--colour"),
        (["egress"], 2, "--socket"),
        (["forward", "80:1:2:3"], 1, "'80:1:2': not a port, HOST:PORT, [IPV6]:PORT or unix:PATH"),
        (["forward", "99999"], 1, "99999 is not a port from 1 to 65535"),
        (["bundle", "--no-interpreter", "--output", "/nonexistent/made"], 1, "/nonexistent/made: No such file"),
        (["bridge", "--upstream", "nowhere", "--", "true"], 125, "'nowhere': must be http"),
        (["ps", "--sandbox", "ws://127.0.0.1:9"], 1, "ws://127.0.0.1:9: Connection refused"),
        (["session", "list"], 1, "no token: set HOLDFAST_SERVICE_TOKEN, or name its file (--token-file)"),
    ],
)
def test_wrong_usage_is_told_on_stderr_and_names_the_thing(
    arguments: list[str],
    code: int,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOLDFAST_SERVICE_TOKEN", raising=False)
    assert main(arguments) == code
    reported = capsys.readouterr()
    assert reported.out == ""
    assert named in reported.err
    assert len(reported.err.splitlines()) == 1


def test_serve_has_a_flag_for_each_setting() -> None:
    options = parser().parse_args(
        ["--max-connections", "7", "--allow-direct-exec", "no", "--spool-directory", "/x"]
    )
    assert set(ExecServerConfig.__struct_fields__) <= set(vars(options))
    assert (options.max_connections, options.allow_direct_exec, options.spool_directory) == (7, False, "/x")
    assert options.allow_prepared_exec is None, "a flag that is not given must not override file and environment"


def test_environment_on_this_machine_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    assert environment(["X=a=b"], here=True, tty=False)["COLOUR"] == "blue"
    assert environment(["X=a=b", "EMPTY="], here=False, tty=False) == {"X": "a=b", "EMPTY": ""}
    assert environment(["COLOUR"], here=False, tty=False) == {"COLOUR": "blue"}


def test_environment_takes_the_terminal_type_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert environment([], here=False, tty=True) == {"TERM": "xterm-256color"}


def test_environment_names_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(InvalidParams, match="NOWHERE"):
        environment(["NOWHERE"], here=True, tty=False)


def test_limits() -> None:
    assert limits(["memory_bytes=2G", "open-files=64", "nice=-5"]) == Limits(
        memory_bytes=2 * 1024**3, open_files=64, nice=-5
    )
    with pytest.raises(InvalidParams, match="'lots'"):
        limits(["cpu_seconds=lots"])


def test_generated_ids_tell_the_program_and_differ() -> None:
    assert generated_id("/usr/bin/make").startswith("make-")
    assert generated_id("/").startswith("process-")
    assert "/" not in generated_id("a b/c d")
    assert generated_id("x") != generated_id("x")


def test_exit_codes() -> None:
    assert exit_code_of(CommandNotFound("x"), ours=125) == 127
    assert exit_code_of(NotExecutable("x"), ours=125) == 126
    assert exit_code_of(TimeoutError("x"), ours=125) == 124
    assert exit_code_of(ConnectionLost("x"), ours=125) == 125
