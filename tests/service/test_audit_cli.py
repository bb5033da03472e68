"""`holdfast audit` and `holdfast audit verify` as a person runs them, on the service's own database."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from sqlalchemy import text

from holdfast.__main__ import main
from holdfast.service.store import Store
from tests.service.session_records import entry, record

KEY = b"0123456789abcdef0123456789abcdef"


async def write(url: str, key: bytes | None = None) -> None:
    async with await Store.open(url, audit_key=key) as store:
        await store.add_session(record(), per_agent=9, total=9)
        await store.append([entry(kind="input", text="make test", command_id="c1", at=1000.0)])
        await store.append([entry(kind="command_ended", exit_code=2, command_id="c1", at=2000.0)])
        await store.append([entry("s2", "input", text="ls", agent_id="b", command_id="c2", at=3000.0)])


@pytest.fixture
def url(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with two sessions, which the settings name."""
    asyncio.run(write(sqlite_url))
    monkeypatch.setenv("HOLDFAST_SERVICE_STORE", sqlite_url)
    return sqlite_url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = main(["audit", *arguments])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def kinds(lines: list[str]) -> list[str]:
    return [json.loads(each)["kind"] for each in lines]


def test_rows_are_shown_oldest_first(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys)
    assert code == 0
    shown = [each.split("  ")[1:] for each in lines]
    assert [each for each in shown if each[0].startswith("s")] == [
        ["s1/1", "a", "input", "[c1]", "make test"],
        ["s1/2", "a", "command_ended", "[c1]", "exit_code=2"],
        ["s2/1", "b", "input", "[c2]", "ls"],
    ]
    assert len(shown) == 5  # and two rows of the service itself, for the beginning of the sessions


def test_rows_are_filtered(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*arguments: str) -> list[str]:
        code, lines, _ = run(capsys, "--json", *arguments)
        assert code == 0
        return [f"{row['sessionId']}/{row['seq']}" for row in map(json.loads, lines)]

    assert found("--session", "s1") == ["s1/1", "s1/2"]
    assert found("--session", "") == ["/1", "/2"]
    assert found("--agent", "b") == ["s2/1"]
    assert found("--kind", "input", "--kind", "nothing") == ["s1/1", "s2/1"]
    assert found("--command-id", "c1") == ["s1/1", "s1/2"]
    assert found("--since", "@1500", "--until", "@3000") == ["s1/2"]
    assert found("--contains", "make") == ["s1/1"]


def test_a_filter_without_a_row_is_reported(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--session", "none") == (0, [], "holdfast: no row matches\n")
    assert run(capsys, "--session", "none", "--json") == (0, [], "")


def test_verify_tells_that_the_log_holds(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "verify")
    assert code == 0
    assert lines[0] == "the audit holds: 5 rows of 2 sessions"
    head = lines[1].removeprefix("head ")
    assert run(capsys, "verify", "--head", head)[0] == 0
    assert run(capsys, "verify", "--head", head.replace("2:", "3:"))[0] == 1
    code, lines, _ = run(capsys, "verify", "--session", "s1", "--json")
    assert (code, json.loads(lines[0])["rows"]) == (0, 2)


def test_verify_names_the_row_that_was_changed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def change() -> None:
        async with await Store.open(url) as store:
            await store.database.write(
                lambda each: each.execute(text("UPDATE audit_rows SET kind = 'x' WHERE at = 2000"))
            )

    asyncio.run(change())
    code, lines, _ = run(capsys, "verify")
    assert code == 1
    assert lines == [
        "session s1, row 2: its content does not match its hash: it was changed",
        "the audit does not hold",
    ]
    code, lines, _ = run(capsys, "verify", "--json")
    assert code == 1
    reported = json.loads(lines[0])
    assert not reported["holds"]
    assert [(each["sessionId"], each["seq"], each["fault"]) for each in reported["breaks"]] == [
        ("s1", 2, "changed")
    ]


def test_a_log_with_a_key_is_verified_with_it(
    sqlite_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(write(sqlite_url, KEY))
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    code, _, error = run(capsys, "verify", "--store", sqlite_url)
    assert (code, error) == (1, "holdfast: the audit was written with a key and cannot be verified without it\n")
    assert run(capsys, "verify", "--store", sqlite_url, "--key-file", str(file))[0] == 0
    assert run(capsys, "--store", sqlite_url)[0] == 0


def test_errors_are_one_line_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "--store", f"sqlite:///{tmp_path}/none.db")
    assert (code, error) == (1, f"holdfast: store {tmp_path}/none.db: No such file or directory\n")
    assert list(tmp_path.iterdir()) == []
    code, _, error = run(capsys, "--store", "mysql://x")
    assert (code, error.count("\n")) == (1, 1)
    code, _, error = run(capsys, "--since", "yesterday", "--store", "sqlite:////x")
    assert "is not a time" in error
    code, _, error = run(capsys, "verify", "--head", "x", "--store", "sqlite:////x")
    assert "SEQ:HASH" in error


async def test_follow_shows_rows_of_another_process_as_they_are_written(store_url: str) -> None:
    await write(store_url)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast", "audit", "--store", store_url, "--follow", "--json", "--kind", "input"),
        stdout=PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert program.stdout is not None
    try:
        shown = [json.loads(await program.stdout.readline())["body"]["text"] for _ in range(2)]
        async with await Store.open(store_url) as store:
            for number in range(3):
                await store.append([entry("s3", "input", text=f"late {number}"), entry("s3", "other")])
                shown.append(json.loads(await program.stdout.readline())["body"]["text"])
        assert shown == ["make test", "ls", "late 0", "late 1", "late 2"]
    finally:
        program.kill()
        await program.wait()
