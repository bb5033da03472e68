"""`holdfast session` against a real service: the verbs of operators, and a session in a person's terminal."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast.sync
from tests.e2e.test_cli_terminals import DETACH, Person
from tests.service.running_service import PATIENCE_SECONDS, RunningService, new_home, running_service, until
from tests.support.parts import needs

pytestmark = needs("bash")

ASK = """
[[profiles.default.commands.rules]]
verdict = "ask"
program = "touch"
"""


class Operator:
    """The verbs with the address and token of one service."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.environ = {"HOLDFAST_SERVICE": f"http://{service.grpc}", "HOLDFAST_SERVICE_TOKEN": service.operator}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.service.home.verb("session", *arguments, **self.environ)

    def printed(self, *arguments: str) -> str:
        done = self(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.printed(*arguments, "--json"))

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        environ = {**self.service.home.environ, **self.environ, "TERM": "xterm-256color"}
        return subprocess.Popen([sys.executable, "-m", "holdfast", "session", *arguments], env=environ, **more)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with new_home() as home:
        (Path(home.directory) / "rules.toml").write_text(ASK)
        with running_service(home, "--rules", f"{home.directory}/rules.toml") as started:
            yield started


@pytest.fixture
def operator(service: RunningService) -> Operator:
    return Operator(service)


def test_a_service_that_does_not_run_is_named_with_the_next_step() -> None:
    with new_home() as home, socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        for variable in ("HOLDFAST_SERVICE", "HOLDFAST_SERVICE_ADDRESS"):
            done = home.verb("session", "list", **{variable: address, "HOLDFAST_SERVICE_TOKEN": "hf_x"})
            assert done.returncode != 0
            assert done.stderr.startswith(f"holdfast: {address}: no service replies here"), done.stderr
            assert "`holdfast service`" in done.stderr
            assert done.stderr.count("\n") == 1


def test_open_list_run_audit_and_close(operator: Operator, tmp_path: Path) -> None:
    id = operator.printed("open", "--label", "task=17", "--kind", "shell", "-e", "A=1").strip()
    (listed,) = operator.json("list", "--label", "task=17")
    assert (listed["sessionId"], listed["kind"], listed["labels"]) == (id, "shell", {"task": "17"})
    assert re.search(rf"^{id} +operator +shell +idle .* task=17$", operator.printed(), re.MULTILINE)
    (tmp_path / "token").write_text(operator.service.operator + "\n")
    home, options = (
        operator.service.home,
        ("--service", operator.service.grpc, "--token-file", f"{tmp_path}/token"),
    )
    ran = home.holdfast("session", "run", *options, "--session", id, "echo $A; echo no >&2; (exit 7)")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "1\n", "no\n")
    assert operator.json("run", "pwd", "--cwd", operator.json("open", "--kind", "shell")["cwd"])["exitCode"] == 0
    rows = [json.loads(line) for line in operator.printed("audit", id, "--json").splitlines()]
    assert rows[0]["kind"] == "session_created"
    assert "echo $A" in operator.printed("audit", id, "--kind", "command")
    assert operator.printed("close", id).startswith(f"{id}  ")
    assert operator.json("list", "--label", "task=17") == []
    assert operator.json("list", "--label", "task=17", "--all")[0]["state"] == "CLOSED"


def test_an_approval_is_watched_listed_approved_and_denied(operator: Operator) -> None:
    with holdfast.sync.ServiceClient(operator.service.grpc, token=operator.service.operator) as client:
        id = client.create_session().session_id
        first = client.send_input(id, "touch one\n").approval_id
        assert re.search(rf"^{first} +{id} +operator .*touch one$", operator.printed("approve"), re.MULTILINE)
        assert operator.printed("approve", first, "--comment", "yes") == "approved\n"
        again = operator("deny", first)
        assert again.returncode == 1
        assert again.stderr.startswith("holdfast: ")
        second = client.send_input(id, "touch two\n").approval_id
        assert operator.json("deny", second) == {"approvalId": second, "outcome": "refused"}
        assert operator.json("approve") == []
        watch = operator.start("watch", "--json", "--type", "SESSION_CLOSED", stdout=subprocess.PIPE)
        assert watch.stdout is not None
        with watch.stdout:
            # The subscription begins with its call; sessions are closed until one of them is an event of it.
            while not select.select([watch.stdout], [], [], 0)[0]:
                client.close_session(client.create_session(kind="shell").session_id, force=True)
            assert json.loads(watch.stdout.readline())["type"] == "SESSION_CLOSED"
            watch.terminate()
            watch.wait(PATIENCE_SECONDS)
        client.close_session(id, force=True)


def test_a_session_in_a_terminal_draws_types_follows_the_size_and_detaches() -> None:
    with (
        new_home() as home,
        running_service(home) as started,
        holdfast.sync.ServiceClient(started.grpc, token=started.operator) as client,
        contextlib.closing(Person(20, 70)) as person,
    ):
        operator = Operator(started)
        id = client.create_session().session_id
        client.run_command("echo before", id)
        attached = person.start(operator, "attach", id)  # type: ignore[arg-type]
        person.see("before")
        person.type(b"expr 40 + 2; stty size\r")
        person.see("42")
        person.see("20 70")
        person.resize(25, 90)
        until(lambda: client.get_session(id).cols == 90)
        person.type(b"stty size\r")
        person.see("25 90")
        person.type(DETACH)
        assert attached.wait(PATIENCE_SECONDS) == 0
        person.see("stays open")
        assert person.is_as_before()
        assert not client.get_session(id).over
        ending = person.start(operator, "attach", id)  # type: ignore[arg-type]
        person.see("42")
        client.close_session(id, force=True)
        ending.wait(PATIENCE_SECONDS)


def test_keys_under_rules_run_wait_for_an_approval_and_are_refused(operator: Operator) -> None:
    """Each line is judged as a whole, however its keys arrive."""
    with (
        holdfast.sync.ServiceClient(operator.service.grpc, token=operator.service.operator) as client,
        contextlib.closing(Person(20, 200)) as person,
    ):
        id = client.create_session().session_id
        client.run_command("echo before", id)
        attached = person.start(operator, "attach", id)  # type: ignore[arg-type]
        person.see("before")
        for key in b"expr 40 + 2; stty size\r":
            person.type(bytes([key]))
        person.see("42")
        person.see("20 200")
        person.type(b"touch held; echo $((6 * 7))0\r")
        person.see("waits for approval")
        (waiting,) = operator.json("approve")
        assert waiting["command"] == "touch held; echo $((6 * 7))0"
        operator.printed("approve", waiting["approvalId"])
        person.see("420")
        person.type(b"touch denied\r")
        until(lambda: operator.json("approve") != [])
        (waiting,) = operator.json("approve")
        operator.printed("deny", waiting["approvalId"], "--comment", "not today")
        person.see(f"approval {waiting['approvalId']} is refused by operator: not today; the command was not run")
        person.type(b"touch dropped")
        person.type(b"\x03echo $((6 * 8))0\r")
        person.see("480")
        assert operator.json("approve") == []
        person.type(DETACH)
        assert attached.wait(PATIENCE_SECONDS) == 0
        client.close_session(id, force=True)


def test_mistakes_are_one_line(operator: Operator) -> None:
    shell = operator.printed("open", "--kind", "shell").strip()
    for arguments, message, code in (
        (("attach", shell), "is a shell without a terminal", 125),
        (("run", "true", "--session", "s", "--cwd", "/"), "leave out --session", 125),
        (("watch", "--output"), "needs the ID", 1),
        (("list", "--label", "x"), "give NAME=VALUE", 1),
        (("close", "none"), "no session 'none'; `holdfast session list --all` lists the ids", 1),
        (("approve", "none"), "no approval 'none'; `holdfast session approve` lists those that wait", 1),
        (("list", "--service", "ftp://x"), "service address 'ftp://x'", 1),
        (("list", "--token-file", "/dev/null"), "no token in this file", 1),
        (("lost",), "no sub-verb 'lost'; did you mean 'list'?", 2),
    ):
        done = operator(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    operator.printed("close", shell, "--force")


def test_a_wrong_token_and_tls_to_a_plain_port_are_one_line_with_the_next_step(service: RunningService) -> None:
    plain = f"http://{service.grpc}"
    for address, token, message in (
        (
            plain,
            "hf_wrong",
            "the token is wrong, or was removed; `holdfast service agent rotate AGENT` makes a new",
        ),
        (
            plain.replace("http:", "https:"),
            service.operator,
            "uses plain text, and this client was made with TLS: wr",
        ),
    ):
        done = service.home.verb("session", "list", HOLDFAST_SERVICE=address, HOLDFAST_SERVICE_TOKEN=token)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
