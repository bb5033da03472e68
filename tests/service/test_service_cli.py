"""`holdfast service` as its operator meets it: first start, restart, agents, rules, status, what goes wrong."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from holdfast.session.v1 import session_pb2 as pb, session_pb2_grpc
from tests.service.running_service import (
    PATIENCE_SECONDS,
    RunningService,
    ServiceHome,
    needs_curl,
    new_home,
    running_service,
    until,
)


@pytest.fixture
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """One that tests share which leave it as it was."""
    with new_home() as made, running_service(made, HOLDFAST_SERVICE_TOKEN_CACHE_SECONDS="0.1") as started:
        yield started


@pytest.fixture(scope="module")
def token(service: RunningService) -> str:
    return service.home.new_agent("shared")


def text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


# --- starting and stopping -------------------------------------------------------------------------------------


def test_the_first_start_makes_an_operator_and_the_next_goes_on_with_its_sessions(home: ServiceHome) -> None:
    with running_service(home) as first:
        token = first.operator
        assert re.fullmatch(r"hf_[\w-]{43}", token)
        assert token not in first.log()
        assert stat.S_IMODE(os.stat(home.database).st_mode) == 0o600
        shell = first.post("CreateSession", token, kind="SHELL")[1]["sessionId"]
        first.post("RunCommand", token, sessionId=shell, command="X=kept; cd /usr")
        assert_stream_ends_with_the_service(first, token, first.post("CreateSession", token)[1]["sessionId"])
    with running_service(home) as second:
        assert second.operator == ""
        ran = second.post("RunCommand", token, sessionId=shell, command="echo $X $PWD")[1]
        assert text(ran["stdout"]) == "kept /usr\n"
        closed = second.post("CloseSession", token, sessionId=shell)[1]
        assert closed["finalState"] == "CLOSED"
    verified = home.verb("audit", "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def assert_stream_ends_with_the_service(service: RunningService, token: str, session_id: str) -> None:
    """TERM ends it with UNAVAILABLE, so that its client comes back to the next one."""
    with grpc.insecure_channel(service.grpc) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        who = (("authorization", f"Bearer {token}"),)
        stream = stub.StreamOutput(pb.StreamOutputRequest(session_id=session_id), metadata=who)
        assert next(stream).session_id == session_id
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as ended:
            for _ in stream:
                pass
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert service.process.wait(PATIENCE_SECONDS) == 0


def test_a_service_that_was_killed_is_as_good_as_one_that_was_stopped(home: ServiceHome) -> None:
    with running_service(home, HOLDFAST_SERVICE_LEASE_SECONDS="3600") as first:
        token = first.operator
        session_id = first.post("CreateSession", token)[1]["sessionId"]
        first.process.kill()
        first.process.wait(PATIENCE_SECONDS)
    with running_service(home) as second:
        ran = second.post("RunCommand", token, sessionId=session_id, command="echo alive")[1]
        assert text(ran["stdout"]).splitlines() == ["alive"]
        # No other process can have the file, so the dead one's lease is not waited for.
        until(lambda: "command_ended" in home.verb("audit", "--session", session_id).stdout)


@needs_curl
def test_for_people_it_prints_where_it_listens_and_a_curl_line_that_works(home: ServiceHome) -> None:
    listen = ["--listen-grpc", "127.0.0.1:0", "--listen-http", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "service", *listen],
        env=home.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        lines: list[str] = []
        while not (lines and "curl" in lines[-1]):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        done = subprocess.run(
            shlex.split(lines[-1]), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert text(json.loads(done.stdout)["stdout"]).splitlines() == ["hello"]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0


# --- what goes wrong -------------------------------------------------------------------------------------------


def refused(home: ServiceHome, *arguments: str) -> str:
    """The one line that a start which fails prints."""
    done = home.verb("service", *arguments)
    assert done.returncode in (1, 2), done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("front", ["--listen-grpc", "--listen-http"])
def test_a_port_in_use_is_one_line(home: ServiceHome, front: str) -> None:
    other = "--listen-http" if front == "--listen-grpc" else "--listen-grpc"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(home, front, address, other, "127.0.0.1:0")
    assert address in line
    assert "in use" in line.lower()


def test_wrong_rules_are_one_line_with_file_line_and_key(home: ServiceHome) -> None:
    rules = os.path.join(home.directory, "rules.toml")
    with open(rules, "w") as file:
        file.write("[profiles.default]\nnetwrk = 1\n")
    line = refused(home, "--rules", rules)
    assert f"{rules}:2" in line
    assert "netwrk" in line


def test_a_database_that_does_not_answer_is_one_line_without_its_password(home: ServiceHome) -> None:
    line = refused(home, "--store", "postgresql://me:secret@127.0.0.1:1/sessions")
    assert "127.0.0.1" in line
    assert "secret" not in line


def test_an_address_for_others_without_tls_is_refused(home: ServiceHome) -> None:
    line = refused(home, "--listen-grpc", "0.0.0.0:0", "--listen-http", "127.0.0.1:0")
    assert "TLS" in line


def test_a_second_service_on_one_sqlite_file_is_refused(service: RunningService) -> None:
    line = refused(service.home, "--listen-grpc", "127.0.0.1:0", "--listen-http", "127.0.0.1:0")
    assert service.home.database in line
    assert str(service.process.pid) in line
    assert service.get("/readyz")[0] == 200


def test_a_sandbox_of_no_kind_is_refused_at_the_start(home: ServiceHome) -> None:
    assert "'dokcer:web'" in refused(home, "--sandbox", "dokcer:web")


def test_a_service_that_nobody_could_reach_is_refused(home: ServiceHome) -> None:
    assert "listen_grpc and listen_http" in refused(home, "--listen-grpc", "-", "--listen-http", "-")


def test_settings_that_are_wrong_are_named(home: ServiceHome) -> None:
    assert "HOLDFAST_SERVICE_MAX_SESSIONS" in home.verb("service", HOLDFAST_SERVICE_MAX_SESSIONS="many").stderr
    assert "tls_key" in refused(home, "--tls-cert", "/nowhere")


# --- agents ----------------------------------------------------------------------------------------------------


def test_agents_are_added_listed_rotated_and_removed(service: RunningService) -> None:
    home = service.home
    token = home.new_agent("worker")
    assert service.post("ListSessions", token)[0] == 200
    listed = json.loads(home.verb("service", "agent", "list", "--json").stdout)
    assert {"agentId": "worker", "role": "agent"}.items() <= next(
        each for each in listed if each["agentId"] == "worker"
    ).items()
    assert token not in json.dumps(listed)
    rotated = home.verb("service", "agent", "rotate", "worker").stdout.strip()
    assert service.post("ListSessions", rotated)[0] == 200
    until(lambda: service.post("ListSessions", token)[0] == 401)
    assert home.verb("service", "agent", "remove", "worker").returncode == 0
    until(lambda: service.post("ListSessions", rotated)[0] == 401)
    assert "worker" not in home.verb("service", "agent", "list").stdout


def test_an_agent_that_is_there_or_is_not_is_one_line(service: RunningService) -> None:
    home = service.home
    home.new_agent("twice")
    for arguments in (["add", "twice"], ["rotate", "nobody"], ["remove", "nobody"], ["add", "a b"]):
        done = home.verb("service", "agent", *arguments)
        assert done.returncode == 1, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_wrong_usage_is_one_line_and_its_own_exit_code(home: ServiceHome) -> None:
    for arguments in ([], ["add"], ["list", "anna"], ["make", "anna"]):
        done = home.verb("service", "agent", *arguments)
        assert done.returncode == 2, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_an_agent_sees_only_its_own_sessions_and_an_operator_all(service: RunningService, token: str) -> None:
    other = service.home.new_agent("other")
    session_id = service.post("CreateSession", token)[1]["sessionId"]
    assert service.post("GetSession", other, sessionId=session_id)[0] == 404
    assert service.post("GetSession", service.operator, sessionId=session_id)[0] == 200
    service.post("CloseSession", token, sessionId=session_id)


# --- rules and status ------------------------------------------------------------------------------------------

RULES = """
[profiles.default.commands]
default = "{default}"
"""


def test_hup_reads_the_rules_again_and_wrong_ones_change_nothing(home: ServiceHome) -> None:
    rules = os.path.join(home.directory, "rules.toml")

    def write(content: str) -> None:
        with open(rules, "w") as file:
            file.write(content)

    write(RULES.format(default="allow"))
    with running_service(home, "--rules", rules) as service:
        token = service.operator
        assert service.post("RunCommand", token, command="true")[0] == 200
        write("[profiles.default\n")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "rules.toml" in service.log())
        assert service.post("RunCommand", token, command="true")[0] == 200
        write(RULES.format(default="deny"))
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.post("RunCommand", token, command="true")[0] == 403)
        write(RULES.format(default="allow"))
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.post("RunCommand", token, command="true")[0] == 200)


def test_check_rules_tells_what_is_in_them_or_what_is_wrong(home: ServiceHome) -> None:
    rules = os.path.join(home.directory, "rules.toml")
    with open(rules, "w") as file:
        file.write(RULES.format(default="allow"))
    good = home.verb("service", "check-rules", rules, "--json")
    assert (good.returncode, "default" in json.loads(good.stdout)["profiles"]) == (0, True)
    assert json.loads(good.stdout)["warnings"] == []
    with open(rules, "a") as file:
        file.write('[profiles.p]\n[[profiles.p.commands.rules]]\nverdict = "allow"\nprogram = ["ls", "git"]\n')
    warned = home.verb("service", "check-rules", rules)
    assert warned.returncode == 0
    assert f"{rules}:5: profiles.p.commands.rules.0: git can run any program" in warned.stderr
    with open(rules, "a") as file:
        file.write("colour = 1\n")
    bad = home.verb("service", "check-rules", rules)
    assert bad.returncode == 1
    assert f"{rules}:8" in bad.stderr
    assert home.verb("service", "check-rules", "/nowhere").returncode == 1


def test_status_tells_whether_one_runs_and_is_ready(service: RunningService, token: str) -> None:
    home = service.home
    address = service.http.removeprefix("http://")
    session_id = service.post("CreateSession", token)[1]["sessionId"]
    report = json.loads(home.verb("service", "status", "--listen-http", address, "--json").stdout)
    assert (report["running"], report["ready"]) == (True, True)
    assert report["sessions"] >= 1
    assert "ready     yes" in home.verb("service", "status", "--listen-http", address).stdout
    service.post("CloseSession", token, sessionId=session_id)
    absent = home.verb("service", "status", "--listen-http", "127.0.0.1:1", "--json")
    assert (absent.returncode, json.loads(absent.stdout)["running"]) == (3, False)


def test_probes_and_metrics_answer_without_a_token(service: RunningService) -> None:
    assert service.get("/healthz") == (200, "ok\n")
    assert json.loads(service.get("/readyz")[1])["ready"] is True
    status, page = service.get("/metrics")
    assert status == 200
    assert "sessions_active" in page


# --- replay ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["TERMINAL", "SHELL"])
def test_a_session_is_played_through_the_service(service: RunningService, token: str, kind: str) -> None:
    session_id = service.post("CreateSession", token, kind=kind)[1]["sessionId"]
    service.post("RunCommand", token, sessionId=session_id, command="echo seen-$((40+2))")
    ways = ["--service", service.grpc]
    played = service.home.holdfast("replay", session_id, *ways, "--idle-limit", "0", HOLDFAST_SERVICE_TOKEN=token)
    assert "seen-42" in played.stdout, played.stderr
    reported = service.home.verb("replay", session_id, *ways, "--json", HOLDFAST_SERVICE_TOKEN=token)
    assert json.loads(reported.stdout)["title"] == session_id
    service.post("CloseSession", token, sessionId=session_id)


def test_a_session_is_found_in_the_database_and_played_from_its_sandbox(
    service: RunningService, token: str
) -> None:
    session_id = service.post("CreateSession", token)[1]["sessionId"]
    service.post("RunCommand", token, sessionId=session_id, command="echo seen-$((40+2))")
    service.post("CloseSession", token, sessionId=session_id)
    for ways in ([], ["--store", f"sqlite:///{service.home.database}"]):
        played = service.home.holdfast("replay", session_id, *ways, "--idle-limit", "0")
        assert "seen-42" in played.stdout, played.stderr
    unknown = service.home.verb("replay", "no-such-session")
    assert unknown.returncode == 1
    assert "no-such-session" in unknown.stderr


def test_somebody_elses_session_is_not_played(service: RunningService, token: str) -> None:
    session_id = service.post("CreateSession", token)[1]["sessionId"]
    other = service.home.new_agent("stranger")
    done = service.home.verb("replay", session_id, "--service", service.grpc, HOLDFAST_SERVICE_TOKEN=other)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    service.post("CloseSession", token, sessionId=session_id)
