"""Programs that no rule allows, in a session with rules that deny by default: the rules refuse the text, and the
operating system refuses the program if the text were not refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.runtime.confine.features import available, detect_features
from holdfast.service.api import PolicyRequest
from holdfast.service.policy.engine import decide_command, resolve
from holdfast.service.policy.rules import load_rules
from holdfast.service.sessions.backend.enforcement import EnforcementPlan, plan
from tests.support.servers import RunningServer, running_server

FOUND = detect_features()
OFFERED = available(FOUND)
MISSING = [
    f"{feature.word}: {feature.missing}"
    for feature in FOUND
    if feature.word in ("bubblewrap", "noexec") and feature.missing
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
RULES = """\
workspaces = "{}"
[profiles.default]
commands.default = "deny"
[[profiles.default.commands.rules]]
verdict = "allow"
program = ["cat", "echo", "test", "printf", "read", "declare", "timeout", "ls", "."]
"""
#: Each ran a program that no rule allows.
ATTACKS = [
    'D=\\$; x="a[$D(id)]"; ((x))',
    '[[ "a[$(id)]" -eq 0 ]]',
    'x="a[\\$(id)]"; [[ x -eq 0 ]]',
    'x="a[\\$(id)]"; echo ${PWD:x}',
    'i="a[\\$(id)]"; a[i]=1',
    'n="a[\\$(id)]"; echo ${!n}',
    "x='a[$'; x+='(id)]'; ((x))",
    "echo >'a[$(id)]'; for x in a*; do ((x)); done",
    "$'\\x{69}d'",
    ". //dev/stdin <<< id",
    "setarch -R id",
    'D=\\$; test -v "a[$D(id)]"',
    "x='a[$(id)]'; declare -i y=x",
    "printf -v x 'a[\\x24(id)]'; ((x))",
    "choom -n 5 -- id",
    "linux32 id",
    "x86_64 id",
    "sg root -c id",
    "/lib64/ld-linux-x86-64.so.2 /usr/bin/id",
    "cat /usr/bin/id >own; /lib64/ld-linux-x86-64.so.2 ./own",
    "git -c alias.z='!id' z",
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
async def box(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with holdfast.connect(server.address("unix")) as box:
        yield box


@pytest.fixture
def planned(tmp_path: Path) -> EnforcementPlan:
    rules = load_rules(RULES.format(tmp_path), "rules.toml")
    (tmp_path / "ann").mkdir()
    return plan(resolve(rules, "ann", PolicyRequest()), OFFERED)


@pytest.mark.parametrize("text", ATTACKS)
def test_the_rules_refuse_the_text(text: str, tmp_path: Path) -> None:
    profile = load_rules(RULES.format(tmp_path), "rules.toml").profile("default")
    assert decide_command(profile, text).verdict == "deny"


async def test_a_shell_has_no_program_that_no_rule_allows(box: Sandbox, planned: EnforcementPlan) -> None:
    assert "programs" in planned.enforced
    assert planned.confinement is not None
    async with await box.shell(cwd=planned.confinement.writable[0], confinement=planned.confinement) as shell:
        assert (await shell.run("echo fine | timeout 5 cat; ls /usr/bin/cat")).stdout == "fine\n/usr/bin/cat\n"
        for text in ATTACKS:
            done = await shell.run(text, timeout=30)
            assert "uid=" not in done.stdout + done.stderr, text


async def test_a_terminal_has_its_prompt_and_no_other_program(box: Sandbox, planned: EnforcementPlan) -> None:
    assert planned.confinement is not None
    where = planned.confinement.writable[0]
    async with await box.terminal(["bash"], cwd=where, confinement=planned.confinement) as terminal:
        done = await terminal.run("echo fine | cat; id")
        assert done.exit_code == 127
        assert done.output.startswith("fine\n")
        assert "uid=" not in done.output
