"""`holdfast sandbox` over the engine `local`: real servers, and the verb in this process except on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.support.typed_verb import run
from tests.support.servers import server_environment


class Verb:
    """`holdfast sandbox`, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """The standard output, or the error line where `code` is not 0."""
        self._capsys.readouterr()
        returned = run("sandbox", list(arguments))
        out, err = self._capsys.readouterr()
        assert returned == code, err
        return err if code else out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("f")
    directory.chmod(0o711)
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    return directory


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str], fleet_directory: Path) -> Iterator[Verb]:
    verb = Verb(capsys)
    yield verb
    left = verb("list", "--engine", "local", "-q").split()
    if left:
        verb("rm", *left)
    assert list(fleet_directory.glob("local/*")) == []


def test_a_sandbox_from_create_to_rm(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("content")
    made = verb.json(
        *("create", "local", "--label", "task=17", "--lifetime", "2h", "--workdir", str(tmp_path)),
        *("--file", f"{tmp_path}/inside={tmp_path}/here", "--setup", "cp inside copied", "--env", "COLOUR=blue"),
        *("--setup", "echo $COLOUR > colour", "--idle", "30m"),
    )
    assert (made["engine"], made["state"], made["labels"]) == ("local", "running", {"task": "17"})
    assert made["expiresAt"] - made["createdAt"] == pytest.approx(7200)
    assert (tmp_path / "copied").read_text() == "content"
    assert (tmp_path / "colour").read_text() == "blue\n"

    (listed,) = verb.json("list", "--engine", "local")
    assert listed["running"] == 0
    assert {**listed, "running": None, "idleSeconds": None} == made
    header, row = verb("--engine", "local", "--label", "task=17").splitlines()
    assert header.split() == ["ID", "ENGINE", "STATE", "AGE", "EXPIRES", "IN", "OWNER", "USE", "LABELS"]
    assert row.split()[:3] == [made["id"], "local", "running"]
    assert " idle " in row
    assert row.endswith("task=17")
    assert verb("--engine", "local", "--label", "task=18", "-q") == ""

    short = made["id"].removeprefix("holdfast-")[:8]
    extended = verb.json("extend", short, "600")
    assert extended["expiresAt"] == pytest.approx(made["expiresAt"] + 600)
    assert "expires  never" in verb("extend", made["address"], "never")
    assert verb.json("rm", short) == {"removed": [made["id"]]}
    assert verb("--engine", "local", "-q") == ""


def test_the_address_is_that_of_other_verbs(verb: Verb) -> None:
    made = dict(line.split(maxsplit=1) for line in verb("create", "local").splitlines())
    argv = [sys.executable, "-m", "holdfast", "run", "--sandbox", made["address"], "echo", "hello"]
    done = subprocess.run(argv, capture_output=True, text=True, env=server_environment(), timeout=60)
    assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr
    assert verb("create", "local", "--quiet").startswith("holdfast-")


def test_abbreviated_ids(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["holdfast-aab2222222222222", "holdfast-aac2222222222222"])
    monkeypatch.setattr("holdfast.fleet.record.new_id", lambda: next(ids))
    verb("create", "local")
    verb("create", "local")
    error = verb("rm", "aa", "--engine", "local", code=1)
    assert "'aa' is the beginning of several ids: holdfast-aab2222222222222 (local), holdfast-aac" in error
    assert "'holdfast-': no sandbox has this id" in verb("rm", "holdfast-", code=1)
    # Nothing is removed if one of the ids does not exist.
    assert "'zz': no sandbox has this id" in verb("rm", "aab", "zz", code=1)
    assert verb("rm", "holdfast-aab", "aac", "aac").split() == [
        "holdfast-aab2222222222222",
        "holdfast-aac2222222222222",
    ]


def test_prune_removes_what_has_expired(verb: Verb, fleet_directory: Path) -> None:
    expired, kept = (verb("create", "local", "-q", "--lifetime", "600").strip() for _ in range(2))
    (fleet_directory / "local" / expired / "expires").write_text("1")
    assert "expired" in verb("--engine", "local")
    assert verb.json("prune", "--engine", "local") == {"removed": [expired]}
    assert verb("--engine", "local", "-q").split() == [kept]


def test_an_operation_that_the_engine_does_not_have(verb: Verb) -> None:
    id = verb("create", "local", "-q").strip()
    for sub_verb in ("pause", "resume", "fork"):
        assert f"engine local: {sub_verb}: this engine does not have it" in verb(sub_verb, id, code=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["vm"], "engine 'vm': not one of bwrap"),
        (["local", "--image", "debian:12"], "engine local: image"),
        (["local", "--memory", "1G"], "engine local: memory"),
        (["local", "--network", "none"], "engine local: network"),
        (["local", "--network", "none", "--network", "a.example"], "--network: none and host"),
        (["local", "--processes", "0"], "processes: 0 is not"),
        (["local", "--cpus", "0"], "cpus: 0.0 is not"),
        (["local", "--lifetime", "0"], "lifetime: 0.0 is not"),
        (["local", "--lifetime", "soon"], "--lifetime 'soon': write seconds"),
        (["local", "--idle", "never"], "idle: infinite"),
        (["local", "--label", "task"], "--label 'task': write NAME=VALUE"),
        (["local", "--label", "holdfast.x=1"], "Holdfast's own"),
        (["local", "--option", "colour=red"], "colour: not an option of this engine"),
        (["local", "--setup", "echo broken >&2; exit 7"], "exit code 7: broken"),
        (["local", "--file", "/x=/no/such/file"], "/no/such/file: No such file"),
        (["local", "--env", "NO_SUCH_VARIABLE_HERE"], "not set here"),
    ],
)
def test_a_refused_create_leaves_nothing(verb: Verb, arguments: list[str], error: str) -> None:
    assert error in verb("create", *arguments, code=1)
    assert verb("--engine", "local", "-q") == ""


def test_an_engine_that_does_not_answer_is_left_out(
    verb: Verb, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 'no engine here' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    id = verb("create", "local", "-q").strip()
    assert run("sandbox", ["-q"]) == 0
    out, err = capsys.readouterr()
    assert id in out
    assert "engine docker is left out: docker ps: no engine here" in err
    assert "no engine here" in verb("--engine", "docker", code=1)
    assert "engine docker does not answer" in verb("rm", "zz", code=1)
    # The error of `docker run`, not that of the removal after it.
    assert "docker: image debian: no engine here" in verb("create", "docker", "--image", "debian", code=1)


def on_terminal(argv: list[str]) -> tuple[bytes, bytes]:
    """Standard output, and what the command printed to the terminal that is its stderr."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=theirs, env={**server_environment(), "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(_reader(ours), b""))
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    return out, shown


def _reader(fd: int) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            return os.read(fd, 65536)
        except OSError:  # the last writer closed the terminal
            return b""

    return read


def test_a_bar_on_a_terminal(verb: Verb) -> None:
    argv = [sys.executable, "-m", "holdfast", "sandbox", "create", "local", "--setup", "true", "--json"]
    out, shown = on_terminal(argv)
    assert json.loads(out)["state"] == "running"
    assert b"setup: sh -c true" in shown
