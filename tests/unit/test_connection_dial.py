"""Addresses: which are understood, and what a wrong one is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.client.dial import describe, dialer, open_connection
from holdfast.errors import CommandNotFound, ConnectionLost, InvalidParams

SPEAKS = """
import sys
request = sys.stdin.readline()
print('{"id":1,"result":{"sessionId":"s","encoding":"json","serverVersion":"9","protocol":1,"resumed":false}}')
sys.stdout.flush()
assert "initialized" in sys.stdin.readline()
sys.stdin.read()
"""


@pytest.mark.parametrize("address", ["", "unix:", "ws:host", "docker", "ftp://x", "stdio:", "LOCAL"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(InvalidParams, match="is no address"):
        dialer(address)


@pytest.mark.parametrize("address", ["local", "unix:/s", "ws://h:1", "wss://h", "stdio:cat -u", ("cat", "-u")])
def test_every_kind_of_address_is_understood(address: str | tuple[str, ...]) -> None:
    assert callable(dialer(address))


def test_a_command_is_described_as_one_would_type_it() -> None:
    assert describe(["docker", "exec", "a b"]) == "docker exec 'a b'"
    assert describe("unix:/s") == "unix:/s"


async def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"none\.sock"):
        await open_connection(f"unix:{tmp_path}/none.sock")
    with pytest.raises(CommandNotFound, match="no-such"):
        await open_connection(["/no-such"])


async def test_a_command_that_speaks_is_a_server_and_ends_with_the_connection() -> None:
    connection = await open_connection([sys.executable, "-c", SPEAKS])
    assert connection.server is not None
    assert connection.server.server_version == "9"
    await connection.aclose()


async def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(ConnectionLost, match="exit code 3: no such container"):
        await open_connection(["sh", "-c", "echo no such container >&2; exit 3"])
