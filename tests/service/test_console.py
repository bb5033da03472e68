"""The console: what the HTTP port serves, its modules under node, and the page itself against a real service."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPResponse
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.console.application import CONTENT_SECURITY_POLICY
from tests.service.running_service import API, PATIENCE_SECONDS, RunningService, new_home, running_service
from tests.support.parts import needs

STATIC = Path(str(files("holdfast.console"))) / "static"
SOURCES = {path.name: path.read_text() for path in sorted(STATIC.iterdir())}
DRIVERS = Path(__file__).parent / "console"
RULES = """
[profiles.default.commands]
rules = [{ verdict = "ask", program = "rm" }, { verdict = "deny", program = "nc" }]
"""

needs_node = needs("node")


def node(driver: str, *arguments: str, given: Any = None) -> str:
    """The output of a driver, which must exit with 0."""
    ran = subprocess.run(
        ["node", str(DRIVERS / driver), STATIC.as_uri(), *arguments],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# --- what is served --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    rules = tmp_path_factory.mktemp("console") / "rules.toml"
    rules.write_text(RULES)
    with new_home() as home, running_service(home, "--rules", str(rules)) as service:
        yield service


def ask(service: RunningService, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    """As it is written: a client of `urllib` would tidy the path up."""
    connection = HTTPConnection(urlsplit(service.http).netloc, timeout=PATIENCE_SECONDS)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/plain", "index.html", "text/html"),
        *((f"/{name}", name, "text/javascript") for name in SOURCES if name.endswith(".js")),
        ("/console.css", "console.css", "text/css"),
    ],
)
def test_the_page_and_its_files_are_served_with_strict_headers(
    service: RunningService, path: str, name: str, kind: str
) -> None:
    reply, body = ask(service, path)
    assert reply.status == 200
    assert body.decode() == SOURCES[name]
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    assert_strict(reply)
    again, nothing = ask(service, path, If_None_Match=f'"other", W/{reply.headers["etag"]}')
    assert (again.status, nothing) == (304, b"")
    assert_strict(again)
    head, nothing = ask(service, path, "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.headers["content-length"] == str(len(body))


def assert_strict(reply: HTTPResponse) -> None:
    assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cross-origin-opener-policy"] == "same-origin"
    assert reply.headers["cross-origin-resource-policy"] == "same-origin"
    assert reply.headers["cache-control"] == "no-cache"


def test_the_policy_lets_a_browser_run_our_files_alone() -> None:
    allowed = dict(each.split(" ", 1) for each in CONTENT_SECURITY_POLICY.split("; "))
    assert allowed.pop("default-src") == "'none'"
    assert allowed.pop("require-trusted-types-for") == "'script'"
    assert set(allowed.values()) == {"'self'", "'none'"}
    assert {name for name, value in allowed.items() if value == "'none'"} == {
        "base-uri",
        "form-action",
        "frame-ancestors",
        "trusted-types",
    }


@pytest.mark.parametrize(
    "path",
    [
        "/index.html",
        "/nothing",
        "/static/console.js",
        "/console.js/",
        "/../application.py",
        "/..%2fapplication.py",
        "/%2e%2e/application.py",
        "/static/../../__init__.py",
        "//etc/passwd",
        "/console.js%00",
    ],
)
def test_anything_else_is_not_there(service: RunningService, path: str) -> None:
    reply, body = ask(service, path)
    assert (reply.status, body) == (404, b"Not Found")
    assert_strict(reply)


def test_the_page_only_is_read(service: RunningService) -> None:
    reply, _ = ask(service, "/", "DELETE")
    assert reply.status == 405
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_the_console_takes_no_path_from_the_others(service: RunningService) -> None:
    assert service.get("/healthz") == (200, "ok\n")
    assert service.get("/readyz")[0] == 200
    assert "sessions_active" in service.get("/metrics")[1]
    assert service.post("ListSessions", service.operator)[0] == 200


@pytest.mark.parametrize("path", ["/", "/console.js", "/metrics", "/healthz", f"{API}ListSessions"])
def test_a_name_that_a_web_page_could_rebind_is_refused(service: RunningService, path: str) -> None:
    port = urlsplit(service.http).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1@evil.example"):
        reply, body = ask(service, path, Host=host)
        assert (reply.status, b"allowed_hosts" in body) == (421, True)
        assert reply.headers["x-content-type-options"] == "nosniff"
    for host in ("127.0.0.1", f"localhost:{port}", f"[::1]:{port}", "sessions.localhost", "upstream"):
        reply, _ = ask(service, path, Host=host)
        assert reply.status != 421


def test_no_page_of_another_site_is_given_leave(service: RunningService) -> None:
    """A preflight gets no header of CORS, whatever origin it names."""
    for origin in ("null", "http://evil.example", service.http):
        for path in ("/", "/metrics", f"{API}ListSessions"):
            asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
            reply, _ = ask(service, path, "OPTIONS", Origin=origin, **asked)
            assert reply.status >= 400
            assert [name for name in reply.headers if name.lower().startswith("access-control")] == []


def test_without_it_the_front_page_is_a_line_as_before() -> None:
    with new_home() as home, running_service(home, HOLDFAST_SERVICE_CONSOLE="false") as service:
        status, line = service.get("/")
        assert (status, line.split(":")[0]) == (200, "holdfast.session.v1.SessionService")
        assert service.get("/console.js")[0] == 404


# --- what the files are ----------------------------------------------------------------------------------------


def test_every_file_that_is_referred_to_is_there_and_every_file_is_referred_to() -> None:
    page = re.findall(r'(?:src|href)="([^"#]+)"', SOURCES["index.html"])
    imported = [name for text in SOURCES.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {*page, *imported, "index.html"} == set(SOURCES)
    # All imports have this form: a bare name or a dynamic one would not be found above.
    assert all(
        re.fullmatch(r'.* from "\./\w+\.js";', line)
        for text in SOURCES.values()
        for line in text.splitlines()
        if re.match(r"import\b|.*\bimport\(", line)
    )


@pytest.mark.parametrize("name", SOURCES)
def test_no_file_makes_markup_of_a_text_runs_a_text_or_asks_another_host(name: str) -> None:
    text = SOURCES[name]
    for bad in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "eval(",
        "Function(",
    ):
        assert bad not in text
    assert re.findall(r"https?:|[\"'(]//|url\(|@import|localStorage|document\.cookie", text) == []
    if name == "index.html":
        assert (
            re.findall(
                r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|javascript:|\sname=\"(?!viewport|color)", text
            )
            == []
        )


def test_every_element_that_the_page_asks_for_is_in_it_once() -> None:
    ids = re.findall(r'\bid="([^"]+)"', SOURCES["index.html"])
    asked = set(re.findall(r'\$\("([^"]+)"\)', SOURCES["console.js"]))
    assert len(ids) == len(set(ids))
    assert asked - set(ids) == set()


# --- its modules -----------------------------------------------------------------------------------------------

ESC = "\x1b"
MARK = "\u0301"
#: Name: what is printed, in chunks, and the lines on the screen.
PRINTED: dict[str, tuple[list[bytes | str], list[str]]] = {
    "lines": (["a\nb\r\n\nc"], ["a", "b", "", "c"]),
    "characters in pieces": ([b"gr\xc3", b"\xbcn \xf0\x9f", b"\x8c", b"\xb2\n"], ["grün 🌲"]),
    "no UTF-8": ([b"a\xff\xfeb\n"], ["a\ufffd\ufffdb"]),
    "a line end in pieces": (["a\r", "\nb"], ["a", "b"]),
    "progress": (["10 %\r", "20 %\r", "100 %"], ["100 %"]),
    "a shorter line over a longer one": (["long line\rshort"], ["shortline"]),
    "cleared to its end": ([f"long line\r{ESC}[Kshort"], ["short"]),
    "cleared whole": ([f"abc{ESC}[2Kd"], ["   d"]),
    "cleared to here": ([f"abcdef\b\b\b{ESC}[1K"], ["    ef"]),
    "characters that are typed over": (["abd\bc\b\b\b\b\bx"], ["xbc"]),
    "colours": ([f"{ESC}[1;31mred{ESC}[0m {ESC}[38;5;12mblue{ESC}[m"], ["red blue"]),
    "colours in pieces": ([f"a{ESC}", "[", "1;3", "1mb"], ["ab"]),
    "bracketed paste and modes": ([f"{ESC}[?2004h$ {ESC}[?2004l\r\n{ESC}="], ["$ "]),
    "a title, ended by BEL": ([f"{ESC}]0;root@box: ~\x07$ "], ["$ "]),
    "a title in pieces, ended by ST": ([f"a{ESC}]0;ti", f"tle{ESC}", "\\b"], ["ab"]),
    "a link": ([f"{ESC}]8;;http://x{ESC}\\here{ESC}]8;;{ESC}\\"], ["here"]),
    "a device string": ([f"a{ESC}Pq#0;2~~\n-{ESC}\\b"], ["ab"]),
    "a character set": ([f"{ESC}(B{ESC})0a"], ["a"]),
    "one-byte controls": (["a\x9b31mb\x9d0;t\x9cc\x90x\x9cd\x85e"], ["abcde"]),
    "broken off": ([f"a{ESC}[31\x18b{ESC}]0;t\x1ac"], ["abc"]),
    "one in another": ([f"a{ESC}[3{ESC}[31mb{ESC}]0;t{ESC}[31mc"], ["abc"]),
    "no sequence after all": ([f"a{ESC}[31ü{ESC}\nb"], ["aü", "b"]),
    "other controls": (["a\x00\x01\x07\x0b\x0c\x7fb\tc"], ["ab\tc"]),
    "a direction turned": (["rm \u202e/ x\u2066\u2069\n"], ["rm \\u{202e}/ x\\u{2066}\\u{2069}"]),
    "markup": (["<b>&amp;\n"], ["<b>&amp;"]),
    "marks": ([f"e{MARK * 4} e{MARK * 6}\n"], [f"e{MARK * 4} e{MARK * 4}" + "\\u{301}" * 2]),
    "marks that \\b puts together": (["e" + f"x\b{MARK}" * 5], [f"e{MARK * 4}" + "\\u{301}"]),
    "a line cleared over and over": (["x" * 8000 + f"{ESC}[2K" * 80 + "end"], [" " * 8000, "end"]),
    "a control string without an end": ([f"{ESC}]0;", "t" * 5000, "shown\n"], ["t" * 906 + "shown"]),
    "a sequence without an end": ([f"{ESC}[", "1" * 5000, "\n"], ["1" * 904]),
    "a line without an end": (["x" * 20000], ["x" * 8192, "x" * 8192, "x" * 3616]),
}  # fmt: skip


def pieces(chunks: Sequence[bytes | str]) -> list[dict[str, str]]:
    return [{"hex": (each if isinstance(each, bytes) else each.encode()).hex()} for each in chunks]


def byte_by_byte(chunks: Sequence[bytes | str]) -> list[dict[str, str]]:
    whole = b"".join(each if isinstance(each, bytes) else each.encode() for each in chunks)
    return [{"hex": bytes([byte]).hex()} for byte in whole]


def on_screen(*cases: dict[str, Any]) -> list[Any]:
    shown: list[Any] = json.loads(node("output.mjs", given=cases))
    return shown


@needs_node
def test_what_is_printed_is_shown_as_lines_without_sequences_however_it_is_cut() -> None:
    short = {name: case for name, case in PRINTED.items() if sum(map(len, case[0])) < 1000}
    whole = on_screen(*({"chunks": pieces(chunks)} for chunks, _ in PRINTED.values()))
    cut = on_screen(*({"chunks": byte_by_byte(chunks)} for chunks, _ in short.values()))
    assert dict(zip(PRINTED, whole, strict=True)) == {
        name: [["", line] for line in lines] for name, (_, lines) in PRINTED.items()
    }
    assert dict(zip(short, cut, strict=True)) == {
        name: [["", line] for line in lines] for name, (_, lines) in short.items()
    }


@needs_node
def test_the_screen_keeps_the_latest_and_no_more() -> None:
    counted = pieces(["".join(f"{number}\n" for number in range(10))] * 3 + ["rest"])
    few = pieces([*(f"{number}\n{number + 1}\n" for number in range(1, 21, 2)), "21"])
    by_lines, by_size, step_by_step = on_screen(
        {"limit": {"lines": 3}, "chunks": counted},
        {"limit": {"characters": 6}, "chunks": counted},
        {"limit": {"lines": 3}, "chunks": few},
    )
    assert step_by_step == [["", "18"], ["", "19"], ["", "20"], ["", "21"]]
    assert by_lines == by_size == [["", "7"], ["", "8"], ["", "9"], ["", "rest"]]


@needs_node
def test_streams_are_told_apart_and_notes_are_ours() -> None:
    out, err = {"stream": "stdout"}, {"stream": "stderr"}
    shown, after_a_gap, commands = on_screen(
        {
            "chunks": [
                {"hex": b"a\xc3".hex(), **out},
                {"hex": b"wrong\xc3".hex(), **err},
                {"hex": b"\xbc\n".hex(), **out},
                {"hex": b"\xa4\n".hex(), **err},
                {"note": "exit\ncode\x1b 3"},
                {"hex": b"b".hex(), **out},
            ]
        },
        {"chunks": [{"hex": b"\x1b]0;\xc3".hex()}, {"forget": True}, {"hex": b"\xbcseen".hex()}]},
        {"text": "rm\u202e \u200bx\x1b[31m\n\ty\U000e0041\u3164\u2800\u00a0e" + MARK * 5},
    )
    assert shown == [
        ["", "a"], ["stderr", "wrong"], ["", "ü"], ["stderr", "ä"], ["note", "exit code\\u{1b} 3"], ["", "b"],
    ]  # fmt: skip
    assert after_a_gap == [["", "\ufffdseen"]]
    assert (
        commands
        == "rm\\u{202e} \\u{200b}x\\u{1b}[31m\n\ty\\u{e0041}\\u{3164}\\u{2800}\\u{a0}e" + MARK * 4 + "\\u{301}"
    )


@needs_node
def test_replies_are_shown_in_words() -> None:
    now = 1_800_000_000_000
    at = "2027-01-15T07:00:00.5Z"  # 59 min 59.5 s before
    metadata = {
        "sessionId": "s1",
        "agentId": "an\u202ena",
        "kind": "SHELL",
        "sandbox": "docker:web",
        "createdAt": at,
        "labels": {"task": "17"},
        "unenforced": ["network", "output"],
        "policy": {"resources": {"memoryBytes": "4294967296", "processes": 10}},
        "usage": {
            "sampledAt": at,
            "cpuPercent": 99.6,
            "memoryBytes": "1572864",
            "processCount": 3,
            "longRunningFlag": True,
        },
    }
    body = json.dumps({"by": "x", "text": "ls \x1b\n", "cut": False, "type": "", "n": None})
    approval = {"approvalId": "a1", "sessionId": "s1", "agentId": "anna", "command": "rm \u202ex", "reason": "asks"}
    row, facts, long_row, audit, changed, asked, expired, *requests = json.loads(
        node(
            "view.mjs",
            given=[
                ["sessionRow", {"metadata": metadata, "state": "BUSY"}, now],
                ["facts", {"metadata": metadata, "state": "BUSY"}, now],
                [
                    "sessionRow",
                    {"metadata": {**metadata, "labels": {"b": "x" * 300, "a": "1"}}, "state": "BUSY"},
                    now,
                ],
                ["auditRow", {"seq": "7", "at": at, "kind": "input", "commandId": "c1", "body": body}],
                ["auditRow", {"seq": "8", "at": at, "kind": "input", "body": "{no JSON"}],
                ["approvalRow", {**approval, "askedAt": at, "expiresAt": "2027-01-15T08:02:03Z"}, now],
                ["approvalRow", {**approval, "askedAt": at, "expiresAt": at}, now],
                ["listRequest", {}],
                ["listRequest", {"states": "all", "agent": " anna "}, "t"],
                ["listRequest", {"states": "BUSY"}],
                ["inputWords", {"accepted": False, "approvalId": "a1"}],
                ["inputWords", {"accepted": True, "queueBusy": True}],
                ["span", 59.9],
                ["span", 90_061],
                ["size", "1023"],
                ["size", "5905580032"],
            ],
        )
    )
    assert row["cells"] == [
        "BUSY", "an\\u{202e}na", "shell", "docker:web", "59 min 59 s", "long-running", "100 %", "1.5 MiB",
        "task=17",
    ]  # fmt: skip
    assert long_row["cells"][-1] == "a=1 b=" + "x" * 294 + "…"
    shown = dict(facts)
    assert shown["NOT enforced"] == "network, output"
    assert shown["memory"] == "1.5 MiB, at most 4 GiB"
    assert shown["processes"] == "3, at most 10"
    assert shown["created"] == "2027-01-15 07:00:00 UTC (59 min 59 s ago)"
    assert "enforced" not in shown
    assert audit["cells"] == ["7", "2027-01-15 07:00:00 UTC", "input", "c1", "ls \\u{1b}  by=x  cut=false"]
    assert changed["cells"][-1] == "{no JSON"
    assert asked["command"] == "rm \\u{202e}x"
    assert asked["words"] == "anna in s1, 59 min 59 s ago: asks"
    assert (asked["left"], expired["left"]) == ("expires in 2 min 3 s", "expired")
    some = {"pageSize": 200, "pageToken": ""}
    assert requests == [
        {"states": ["RUNNING", "BUSY", "IDLE", "CLOSING"], "agentId": "", **some},
        {"states": [], "agentId": "anna", **some, "pageToken": "t"},
        {"states": ["BUSY"], "agentId": "", **some},
        "The input waits for an approval (a1).",
        "Accepted; the program has not read all of it yet.",
        "59 s",
        "1 d 1 h",
        "1023 B",
        "5.5 GiB",
    ]


@needs_node
def test_output_is_followed_from_token_to_token_through_trouble_gaps_and_to_the_end() -> None:
    assert node("follow.mjs") == "it follows\n"


@needs_node
def test_what_goes_wrong_with_a_call_is_told_in_words_and_lost_input_is_sent_again_by_its_id() -> None:
    assert node("answers.mjs") == "all of it is told in words\n"


@needs_node
def test_a_session_is_made_typed_into_read_and_closed_by_the_pages_modules(service: RunningService) -> None:
    told = json.loads(node("session.mjs", service.http + "/plain", service.operator))
    assert told["closed"]["finalState"] == "CLOSED"
    assert "closed by operator" in told["closed"]["summary"]
    assert told["facts"]["agent"] == "operator"
    assert told["facts"]["labels"] == "task=17"
    assert told["row"]["id"] == told["id"]
    assert told["row"]["cells"][1:4] == ["operator", "terminal", "local"]
    assert any("(exit 3)" in cells[-1] for cells in told["audit"])
    assert [int(cells[0]) for cells in told["audit"]] == list(range(len(told["audit"]), 0, -1))
    assert told["abort"] == "AbortError"
    errors = told["errors"]
    assert errors["wrong token"]["words"] == "the token is wrong, or was removed (TOKEN_UNKNOWN)"
    assert errors["wrong token"]["code"] == "unauthenticated"
    assert errors["no session"]["words"] == "no session 'ses-none' (SESSION_NOT_FOUND)"
    assert errors["closed"]["words"].endswith("is CLOSED: closed by operator (SESSION_CLOSED)")
    assert errors["no service"]["words"] == "the service does not answer: it is unreachable"
    assert errors["no answer of ours"]["words"] == "HTTP 404, which is not an answer of the service"
    assert [name for name, error in errors.items() if error["transient"]] == ["no service"]


@needs_node
def test_the_page_does_what_an_operator_and_an_agent_ask_of_it(service: RunningService) -> None:
    agent = service.home.new_agent("builder")
    assert node("page.mjs", service.http + "/plain", service.operator, agent) == "the page works\n"
