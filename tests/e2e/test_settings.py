"""Settings by file, by environment and by flag, in this order; and the error of a wrong one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.servers import conversation, running_server, server_command, server_environment


async def limit_of(address: str) -> int:
    """How many processes a session may have there."""
    async with conversation(address) as talk:
        await talk.initialize()
        for number in range(10):
            reply = await talk.reply(
                await talk.ask("process/start", processId=f"{number}", argv=["sleep", "1000"], subscribe=False)
            )
            if "error" in reply:
                assert "max_processes_per_connection" in reply["error"]["message"]
                return number
    return 10


async def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_processes_per_connection = 2\nshutdown_grace_period_ms = 100\n")
    config = ["--config", str(file)]
    environ = {"HOLDFAST_MAX_PROCESSES_PER_CONNECTION": "3"}
    with running_server(arguments=config) as server:
        assert await limit_of(server.address("unix")) == 2
    with running_server(arguments=config, environ=environ) as server:
        assert await limit_of(server.address("unix")) == 3
    with running_server(arguments=config, environ=environ, settings={"max_processes_per_connection": 4}) as server:
        assert await limit_of(server.address("unix")) == 4
    with running_server(settings={"shutdown_grace_period_ms": 100}) as server:
        assert await limit_of(server.address("unix")) == 10


async def test_every_kind_of_value(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    file = tmp_path / "settings.toml"
    file.write_text('allow_direct_exec = false\ndetached_session_seconds = 0.5\ncgroup = "off"\n')
    # The flag of the test server names its own spool; a later one wins.
    with running_server(arguments=["--config", str(file), "--spool-directory", str(spool)]) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            code, message = await talk.error("process/start", processId="x", argv=["true"])
            assert (code, "allow_direct_exec" in message) == (-32007, True)
            status = await talk.result("environment/status")
            assert status["spool"].startswith(f"{spool}/")
            assert "cgroup" not in status["containment"]
            assert status["listening"] == server.listening
            assert status["pid"] == server.pid
    assert list(spool.iterdir()) == []


async def test_the_environment_takes_the_words_for_yes_and_no() -> None:
    for word, allowed in (("false", False), ("0", False), ("true", True), ("1", True)):
        with running_server(environ={"HOLDFAST_ALLOW_DIRECT_EXEC": word}) as server:
            async with conversation(server.address("unix")) as talk:
                await talk.initialize()
                reply = await talk.reply(await talk.ask("process/start", processId="x", argv=["true"]))
                assert ("result" in reply) is allowed, word


@pytest.mark.parametrize(
    ("toml", "environ", "arguments", "named"),
    [
        ("no_such_setting = 1", {}, [], "'no_such_setting'"),
        ("max_connections = 'many'", {}, [], "max_connections"),
        ("max_connections = [", {}, [], "settings.toml"),
        ("", {"HOLDFAST_MAX_CONNECTIONS": "many"}, [], "HOLDFAST_MAX_CONNECTIONS='many'"),
        ("", {}, ["--max-connections", "many"], "--max-connections"),
        ("", {}, ["--allow-direct-exec", "maybe"], "--allow-direct-exec"),
        ("", {}, ["--no-such-flag"], "--no-such-flag"),
        ("", {}, ["--config", "/no/such/file"], "/no/such/file"),
        ("", {}, ["--listen", "carrier-pigeon"], "'carrier-pigeon'"),
        ("", {}, ["--spool-directory", "/proc/no/spool"], "/proc/no/spool"),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(
    toml: str, environ: dict[str, str], arguments: list[str], named: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(toml)
    listen = [] if "--listen" in arguments else ["--listen", f"unix:{tmp_path}/s"]
    ended = subprocess.run(
        [*server_command([]), *listen, "--config", str(file), *arguments],
        env=server_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode != 0
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "s").exists()
