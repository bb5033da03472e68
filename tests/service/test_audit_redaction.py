"""Texts that resemble a secret are not written down, others are; and how rows and times read for people."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, strategies as st

from holdfast.service.audit.playback import VALUE_CHARS, fields, line, moment
from holdfast.service.audit.redaction import REDACTED, Redactor, cut
from holdfast.service.problems import Invalid
from holdfast.service.types import AuditRow

#: The secret in each is `S3cr3t…`; nothing of it may be left, and all of the rest must.
HIDDEN = [
    "export AWS_SECRET_ACCESS_KEY=S3cr3t/abc+def",
    "DB_PASSWORD='S3cr3t with spaces' ./run",
    'curl -H "Authorization: Bearer S3cr3t.abc" https://example.com',
    "curl -H 'Authorization: Basic S3cr3tabc=='",
    "curl -u me:S3cr3t https://example.com",
    "curl -s --user=me:S3cr3t https://example.com",
    "psql postgresql://me:S3cr3t@host/db",
    "git clone https://x-access-token:S3cr3t@github.com/a/b",
    "tool --password S3cr3t --verbose",
    "tool --password=S3cr3t --verbose",
    "tool --api-key 'S3cr3t' --verbose",
    "tool -token S3cr3t",
    "tool --client-secret=S3cr3t",
    "mysql -u root -pS3cr3t db",
    "mysqldump --all -pS3cr3t",
    "sshpass -p S3cr3t ssh host",
    '{"password": "S3cr3t", "n": 1}',
    "api_key: S3cr3t",
    "GITHUB_TOKEN=S3cr3t make",
    "PGPASSWORD=S3cr3t SMTP_PASS=S3cr3t GITHUB_PAT=S3cr3t psql",
    "DATABASE_URL=sqlite:S3cr3t make",
    "env: DB_PASS=S3cr3t",
    "tool --verbose --db-pass S3cr3t --signing-key=S3cr3t",
    '{"dbPassword": "S3cr3t", "smtpPass": "S3cr3t"}',
    "https://example.com/?token=S3cr3t&x=1",
    "Set-Cookie: session=S3cr3t; Path=/",
    "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4\nS3cr3t\nS3cr3t\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nS3cr3t",
]
KEYS = [
    "AKIAIOSFODNN7EXAMPLE",
    "sk-" + "a1B2c3D4e5F6" * 3,
    "hf_" + "0123456789abcdef" * 4,
    "AIza" + "a1B2c3D4e5" * 3 + "f6g7h",
    "ghp_" + "a1B2c3D4e5F6" * 3,
    "github_pat_" + "a1B2c3D4e5F6" * 3,
    "glpat-abcdefghij1234567890",
    "xoxb-123456789012-abcdefGHIJ",
    "npm_" + "a1B2c3D4e5F6" * 3,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefghijklmnop",
]
SHOWN = [
    "ls -l",
    "git commit -m 'fix the password reset'",
    "grep token file.txt",
    "max_tokens = 4096",
    "PATH=/usr/bin PATTERN=x KEYBOARD=de MONKEY=1 key: value PASS: 12",
    "TOKEN=$TOKEN make",
    "TOKEN=${TOKEN} make",
    "if token == other:",
    "cat ~/.ssh/id_rsa.pub",
    "https://example.com/a:b/c",
    "ssh me@host -p 22",
    "git log --author me",
    "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
    "tar -pxf x.tar",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_secret_is_known_by_where_it_stands(text: str) -> None:
    redacted = Redactor()(text)
    assert "S3cr3t" not in redacted
    assert REDACTED in redacted
    assert redacted.split(REDACTED)[0] == text[: len(redacted.split(REDACTED)[0])]
    assert Redactor()(redacted) == redacted


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_known_by_its_form(key: str) -> None:
    assert Redactor()(f"echo {key} | tool") == f"echo {REDACTED} | tool"


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert Redactor()(text) == text


@pytest.mark.parametrize("value", ['"hun"ter2', "hun'ter2'", "'hun'\"ter2\"", '"h"u"n"t"e"r"2"'])
def test_parts_that_a_shell_joins_are_one_secret(value: str) -> None:
    assert Redactor()(f"export PASSWORD={value}; ls") == "export PASSWORD=[redacted]; ls"
    assert Redactor()(f"tool --token {value} x") == "tool --token [redacted] x"


@pytest.mark.parametrize("command", ["curl -u a:hunter1 -u b:hunter2 h", "mysql -phunter1 -phunter2 db"])
def test_every_password_of_a_command_is_hidden(command: str) -> None:
    """The program takes the last one."""
    assert Redactor()(command).count("[redacted]") == 2
    assert "hunter" not in Redactor()(command)


def test_a_pattern_that_finds_what_is_put_in_makes_no_text_longer_and_longer() -> None:
    assert Redactor(["e"])("see") == "s[redacted][redacted]"


def test_a_password_that_is_missing_hides_no_command_below_it() -> None:
    """The name of the program was taken for the password, and its own password stayed."""
    assert "hunter2" not in Redactor()("sshpass -p\ncurl -u me:hunter2 h")
    assert "hunter2" not in Redactor()("tool --token\nmysql -phunter2 db")
    assert "hunter2" not in Redactor()("Authorization:\nPASSWORD='a'hunter2")


def test_patterns_of_one_s_own() -> None:
    redact = Redactor([r"geheim-\d+", r"pin (?P<secret>\d{4})"])
    assert redact("geheim-12 and pin 1234") == f"{REDACTED} and pin {REDACTED}"
    with pytest.raises(Invalid, match="not a regular expression"):
        Redactor(["("])


def test_a_body_is_redacted_by_the_names_of_its_parts_too() -> None:
    body = {"password": "x", "n": 1, "list": ["token=x"], "inner": {"API_KEY": "y", "key": "z"}, "token": None}
    assert Redactor().body(body) == {
        "password": REDACTED,
        "n": 1,
        "list": [f"token={REDACTED}"],
        "inner": {"API_KEY": REDACTED, "key": "z"},
        "token": None,
    }


@given(st.text(max_size=300))
def test_redaction_takes_any_text_and_changes_nothing_twice(text: str) -> None:
    redact = Redactor()
    once = redact(text)
    assert redact(once) == once


def test_a_long_text_is_cut_and_its_length_and_hash_kept() -> None:
    assert cut("short", 5) == {"text": "short"}
    long = "ä" * 100
    assert cut(long, 5) == {"text": "ää", "length": 200, "sha256": hashlib.sha256(long.encode()).hexdigest()}


# --- for people -----------------------------------------------------------------------------------------------


def row(body: str, kind: str = "command", command_id: str = "c1") -> AuditRow:
    return AuditRow("s1", 7, 1763294402.25, "a", kind, command_id, body, "0", "1")


def test_a_row_reads_as_one_line() -> None:
    text = line(row('{"command":"ls -l\\n","exit_code":0,"empty":""}'), zone=UTC)
    assert text == "2025-11-16 12:00:02.250  s1/7  a  command  [c1]  ls -l  exit_code=0"
    assert line(row("{}", command_id=""), zone=UTC) == "2025-11-16 12:00:02.250  s1/7  a  command"
    own = row('{"session_id":"s2","seq":4,"hash":"abc","opened":3}', "stream_marked", "")
    assert line(own, zone=UTC).endswith("stream_marked  session_id=s2  seq=4")


def test_what_a_command_printed_cannot_move_the_cursor_of_who_reads_it() -> None:
    text = line(row('{"text":"\\u001b[2Jgone\\nnext\\u0007"}'), zone=UTC)
    assert text.endswith(r"\x1b[2Jgone\nnext\x07")
    assert text.isprintable()
    assert len(line(row('{"text":"' + "x" * 5000 + '"}'))) < VALUE_CHARS + 100
    assert line(row("changed by somebody"), zone=UTC).endswith("changed by somebody")


def test_a_row_as_json_has_everything() -> None:
    assert fields(row('{"n":1}')) == {
        "sessionId": "s1",
        "seq": 7,
        "at": 1763294402.25,
        "agentId": "a",
        "kind": "command",
        "commandId": "c1",
        "body": {"n": 1},
        "previous": "0",
        "hash": "1",
    }


def test_times_as_people_say_them() -> None:
    now = 1_000_000.0
    assert moment("90s", now) == now - 90
    assert moment("2h", now) == now - 7200
    assert moment("1.5d", now) == now - 129_600
    assert moment("@12.5", now) == 12.5
    noon = datetime(2026, 7, 31, 12, tzinfo=timezone(timedelta(hours=2)))
    assert moment("2026-07-31T12:00:00+02:00", now) == noon.timestamp()
    assert moment("2026-07-31", now) == datetime(2026, 7, 31).astimezone().timestamp()
    for text in ("", "yesterday", "10", "@x", "-5m"):
        with pytest.raises(Invalid, match="is not a time"):
            moment(text, now)
