"""The provider's own behaviour: configurations, errors, limits, and what is left after a sample."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec, SandboxUnavailableError
from inspect_ai.util._sandbox.limits import override_max_exec_output_size

from holdfast.errors import InvalidParams
from holdfast.fleet.fleet import Fleet
from holdfast.integrations.inspect_ai import Config, HoldfastSandbox
from holdfast.integrations.inspect_ai.config import choose, usable_engine


@pytest_asyncio.fixture
async def box() -> AsyncIterator[HoldfastSandbox]:
    made = await HoldfastSandbox.sample_init("provider", None, {})
    try:
        yield made["default"].as_type(HoldfastSandbox)
    finally:
        await HoldfastSandbox.sample_cleanup("provider", None, made, False)


def _compose(tmp_path: Path, text: str) -> str:
    path = tmp_path / "compose.yaml"
    path.write_text(text)
    return str(path)


# --- configurations -----------------------------------------------------------------------------------------------


async def test_without_a_configuration_it_is_a_jail() -> None:
    assert await usable_engine() == "bwrap"


def test_a_configuration_survives_the_log_and_is_hashable() -> None:
    config = Config(engine="bwrap", memory="256M", env={"A": "1"})
    spec = SandboxEnvironmentSpec("holdfast", config)
    assert SandboxEnvironmentSpec.model_validate(spec.model_dump()).config == config
    assert len({spec, SandboxEnvironmentSpec("holdfast", config)}) == 1


def test_a_compose_file_becomes_a_template(tmp_path: Path) -> None:
    text = """
services:
  agent:
    image: debian:12
    x-default: true
    command: tail -f /dev/null
    environment: [A=1, B=]
    cpus: 1.5
    mem_limit: 512mb
    network_mode: none
    working_dir: /work
    user: nobody
"""
    choice = choose(_compose(tmp_path, text))
    template = choice.template
    assert (choice.engine, choice.name, choice.command) == ("docker", "agent", ("tail", "-f", "/dev/null"))
    assert (template.image, template.cpus, template.memory, template.network) == (
        "debian:12",
        1.5,
        512 << 20,
        "none",
    )
    assert (template.workdir, template.user, template.env) == ("/work", "nobody", {"A": "1", "B": ""})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("services: {a: {image: x}, b: {image: y}}", "services: a, b"),
        ("services: {a: {build: .}}", "service a: build"),
        ("services: {a: {image: x, privileged: true, cap_add: [ALL]}}", "service a: cap_add, privileged"),
        ("services: {a: {image: x, network_mode: bridge}}", "service a: network_mode"),
        ('services: {a: {image: "x:${SAMPLE_METADATA_TAG}"}}', "service a: image"),
        ("{services: {a: {image: x}}, volumes: {v: {}}}", "volumes"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidParams, match=named):
        choose(_compose(tmp_path, text))


async def test_a_field_that_the_engine_lacks_fails_the_task() -> None:
    with pytest.raises(InvalidParams, match="engine local: memory"):
        await HoldfastSandbox.task_init("provider", Config(engine="local", memory="1G"))


# --- commands -----------------------------------------------------------------------------------------------------


async def test_a_timeout_has_the_output_so_far(box: HoldfastSandbox) -> None:
    with pytest.raises(TimeoutError) as raised:
        await box.exec(["sh", "-c", "echo before; sleep 1000"], timeout=2)
    assert getattr(raised.value, "truncated_output", None) == "before\n"


async def test_a_command_that_does_not_exist_is_a_failed_result(box: HoldfastSandbox) -> None:
    result = await box.exec(["no-such-program"])
    assert (result.success, result.returncode) == (False, 127)
    assert "no-such-program" in result.stderr


async def test_more_output_than_allowed(box: HoldfastSandbox) -> None:
    with override_max_exec_output_size(1024), pytest.raises(OutputLimitExceededError) as raised:
        await box.exec(["sh", "-c", "yes | head -c 5000"])
    assert raised.value.truncated_output is not None
    assert len(raised.value.truncated_output) == 1024


async def test_a_kill_for_memory_is_said() -> None:
    config = Config(engine="bwrap", memory="128M")
    made = await HoldfastSandbox.sample_init("provider", config, {})
    try:
        hog = "held = [bytearray(b'x' * (8 << 20)) for _ in range(64)]"
        result = await made["default"].exec(["python3", "-c", hog])
        assert result.returncode == 137
        assert "out of memory" in result.stderr
    finally:
        await HoldfastSandbox.sample_cleanup("provider", config, made, False)


async def test_a_dead_sandbox_is_unavailable(box: HoldfastSandbox) -> None:
    assert (await box.exec(["true"])).success
    async with Fleet("bwrap") as fleet:
        await fleet.remove(box.box.ref.id)
    for call in (box.exec(["true"]), box.read_file("/etc/hostname"), box.write_file("f", "text")):
        with pytest.raises(SandboxUnavailableError):
            await call


# --- after a sample -----------------------------------------------------------------------------------------------


async def test_cleanup_of_the_command_line_removes_sandboxes_of_evaluations() -> None:
    made = await HoldfastSandbox.sample_init("provider", None, {})
    box = made["default"].as_type(HoldfastSandbox)
    await box.box.aclose()
    argv = [sys.executable, "-m", "inspect_ai", "sandbox", "cleanup", "holdfast"]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    async with Fleet("bwrap") as fleet:
        assert await fleet.list() == []


async def test_connection_is_a_command_that_opens_a_shell(box: HoldfastSandbox) -> None:
    connection = await box.connection()
    assert connection.type == "holdfast"
    program, verb, *rest = shlex.split(connection.command)
    assert (program, verb, rest) == ("holdfast", "shell", ["--sandbox", box.box.ref.address])
