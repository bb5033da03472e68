"""The completion scripts in real shells, with the ids of a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_cli_verbs import Holdfast, own_holdfast
from tests.support.parts import needs

#: Prints what the function offers for the words; the last one is being completed.
CALL = """
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


SANDBOX = f"holdfast-{'a' * 16}"


@pytest.fixture(scope="module")
def holdfast() -> Iterator[Holdfast]:
    with own_holdfast() as command:
        for id in ("web-1", "web-2", "$(touch evil)", "a b"):
            assert command("run", "--id", id, "--", "true").returncode == 0
        fleet = command.environment["HOLDFAST_FLEET_DIRECTORY"] = f"{command.directory}/fleet"
        os.makedirs(f"{fleet}/bwrap/{SANDBOX}")
        assert command("shell", "open", "--id", "live", "--shell", "sh").returncode == 0
        yield command


@pytest.fixture(scope="module")
def location(holdfast: Holdfast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the command `holdfast` and the scripts."""
    location = tmp_path_factory.mktemp("completion")
    program = location / "holdfast"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    program.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        (location / shell).write_bytes(holdfast("completion", shell).stdout)
    return location


def run(holdfast: Holdfast, location: Path, *argv: str) -> list[str]:
    environment = {**holdfast.environment, "PATH": f"{location}:{os.environ['PATH']}", "HOME": str(location)}
    done = subprocess.run(argv, cwd=location, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def offered(holdfast: Holdfast, location: Path, shell: str, words: str) -> list[str]:
    if shell == "fish":
        line = words.replace("''", "")
        script = f"source {location}/fish; complete -C'{line}'"
        return run(holdfast, location, "fish", "--no-config", "-c", script)
    call = CALL.format(words=words)
    if shell == "bash":
        return run(holdfast, location, "bash", "--norc", "-c", f"source {location}/bash; {call}")
    return run(
        holdfast, location, "zsh", "-f", "-c", f"source {location}/zsh; setopt ksh_arrays sh_word_split; {call}"
    )


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=needs("zsh")), pytest.param("fish", marks=needs("fish"))]
)
def test_verbs_options_and_ids_are_completed(holdfast: Holdfast, location: Path, shell: str) -> None:
    assert "inspect" in offered(holdfast, location, shell, "holdfast insp")
    assert "--timestamps" in offered(holdfast, location, shell, "holdfast logs --time")
    assert offered(holdfast, location, shell, "holdfast logs web-") == ["web-1", "web-2"]
    assert offered(holdfast, location, shell, "holdfast shell run li") == ["live"]
    assert {"web-1", "web-2", "live"} <= set(offered(holdfast, location, shell, "holdfast inspect ''"))
    # Sandboxes, and not the processes of the server.
    for sub_verb in ("rm", "fork", "extend"):
        assert offered(holdfast, location, shell, f"holdfast sandbox {sub_verb} holdfast-") == [SANDBOX]
    assert "web-1" not in offered(holdfast, location, shell, "holdfast sandbox rm ''")
    # An id that a shell would interpret is not passed to one.
    assert not (location / "evil").exists()


def test_bash_offers_no_ids_of_another_sandbox(holdfast: Holdfast, location: Path) -> None:
    assert offered(holdfast, location, "bash", "holdfast logs --sandbox docker:x web-") == []
    assert offered(holdfast, location, "bash", "holdfast run -- web-") == []


def test_ids_need_no_server(tmp_path: Path) -> None:
    nowhere = Holdfast(str(tmp_path))
    done = nowhere("completion", "ids", "process")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert os.listdir(tmp_path) == []
    assert nowhere("completion", "tcsh").returncode == 2


def test_ids_of_a_kind(holdfast: Holdfast) -> None:
    assert holdfast("completion", "ids", "shell").stdout == b"live\n"
    assert holdfast("completion", "ids", "terminal").stdout == b""
    assert holdfast("completion", "ids", "process", "--sandbox", "docker:x").stdout == b""
