"""`BashExecutor` with and without sessions: one suite, so that the flag changes the executor, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import holdfast
from holdfast.service.shim.bash_executor import ExecutionResult
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.service.running_service import RunningService, ServiceHome, new_home, running_service

MakeExecutor = Callable[..., holdfast.BashExecutor]


@pytest.fixture(scope="module")
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def work(home: ServiceHome) -> str:
    """A directory that commands may use with sessions and without."""
    directory = os.path.join(home.directory, "work")
    os.mkdir(directory)
    return directory


@pytest.fixture(scope="module")
def service(home: ServiceHome, work: str) -> Iterator[RunningService]:
    rules = os.path.join(home.directory, "rules.toml")
    with open(rules, "w") as file:
        file.write(f'[profiles.default.directories]\nwritable = ["{{workspace}}", "{work}"]\n')
    with running_service(home, "--rules", rules) as started:
        yield started


@pytest.fixture(scope="module")
def token(service: RunningService) -> str:
    return service.home.new_agent("builder")


@pytest.fixture(params=["on", "off"])
def make(request: pytest.FixtureRequest, home: ServiceHome, monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    """Makes executors with the flag on and with it off."""
    monkeypatch.setenv("HOLDFAST_SESSION_EXECUTOR", request.param)
    monkeypatch.setenv("HOLDFAST_DIRECTORY", home.environ["HOLDFAST_DIRECTORY"])
    if request.param == "on":
        service: RunningService = request.getfixturevalue("service")
        monkeypatch.setenv("HOLDFAST_SERVICE_ADDRESS", service.grpc)
        monkeypatch.setenv("HOLDFAST_SERVICE_TOKEN", request.getfixturevalue("token"))
    return holdfast.BashExecutor


def test_a_command_has_its_output_its_errors_and_its_exit_code(make: MakeExecutor) -> None:
    with make() as bash:
        result = bash.run("echo out; echo err >&2; (exit 3)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert not result.timed_out
    assert not result.success
    assert result.duration >= 0


async def test_the_same_on_an_event_loop(make: MakeExecutor) -> None:
    async with make() as bash:
        result = await bash.run_async("echo out; echo err >&2; (exit 3)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)


def test_a_command_that_takes_too_long_is_ended_and_said_to_be(make: MakeExecutor) -> None:
    with make() as bash:
        bash.run("true")  # what takes long is the command, and not what comes before the first one
        for timeout in TIMEOUTS:
            result = bash.run("echo before; sleep 1000", timeout=timeout)
            if result.stdout:
                break
        after = bash.run("echo after")
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, "before\n")
    assert after.stdout == "after\n"


def test_the_executors_own_timeout_is_for_commands_that_name_none(make: MakeExecutor) -> None:
    with make(timeout=0.3) as bash:
        assert bash.run("sleep 1000").timed_out
        assert bash.run("sleep 0.4; echo done", timeout=60).stdout == "done\n"


def test_commands_have_the_directory_and_the_variables_of_the_executor(make: MakeExecutor, work: str) -> None:
    with make(cwd=work, env={"NAME": "world"}) as bash:
        assert bash.run('echo "$NAME in $PWD"').stdout == f"world in {work}\n"


def test_quotes_lines_and_here_documents_go_through_as_they_are(make: MakeExecutor) -> None:
    with make() as bash:
        result = bash.run("cat <<'END'\n$HOME \"q\" 'p' \\n\nEND\necho \"a  b\" | tr a-z A-Z")
    assert result.stdout == "$HOME \"q\" 'p' \\n\nA  B\n"


def test_output_that_is_no_utf8_is_shown_all_the_same(make: MakeExecutor) -> None:
    with make() as bash:
        assert bash.run("printf 'a\\377b'").stdout == "a�b"


def test_an_exit_ends_no_executor(make: MakeExecutor) -> None:
    with make() as bash:
        assert bash.run("exit 7").exit_code == 7
        assert bash.run("echo alive").stdout == "alive\n"


def test_stdin_is_empty(make: MakeExecutor) -> None:
    with make() as bash:
        assert bash.run("cat; echo end", timeout=60).stdout == "end\n"


def test_a_closed_executor_can_be_closed_again_and_used_again(make: MakeExecutor) -> None:
    bash = make()
    bash.run("true")
    bash.close()
    bash.close()
    assert bash.run("echo again").stdout == "again\n"
    bash.close()


# --- what sessions add -----------------------------------------------------------------------------------------


@pytest.fixture
def with_sessions(service: RunningService, token: str) -> Iterator[holdfast.BashExecutor]:
    with holdfast.BashExecutor(service.grpc, token=token, sessions=True) as bash:
        yield bash


def test_state_stays_from_command_to_command(with_sessions: holdfast.BashExecutor) -> None:
    with_sessions.run("cd /usr; export X=1; f() { echo f$X; }")
    assert with_sessions.run("pwd; f").stdout == "/usr\nf1\n"


def test_without_persistence_nothing_stays(service: RunningService, token: str) -> None:
    with holdfast.BashExecutor(service.grpc, token=token, persistent=False) as bash:
        bash.run("cd /usr; export X=1")
        assert bash.run("echo $X").stdout == "\n"


def test_the_session_is_closed_with_the_executor(service: RunningService, token: str) -> None:
    with holdfast.BashExecutor(service.grpc, token=token) as bash:
        bash.run("true")
        _, found = service.post("ListSessions", token, states=["IDLE", "RUNNING", "BUSY"])
        assert len(found["sessions"]) == 1
    _, found = service.post("ListSessions", token, states=["IDLE", "RUNNING", "BUSY"])
    assert found["sessions"] == []


def test_a_session_that_somebody_closed_is_made_again(service: RunningService, token: str) -> None:
    with holdfast.BashExecutor(service.grpc, token=token) as bash:
        bash.run("X=1")
        _, found = service.post("ListSessions", token, states=["IDLE", "RUNNING", "BUSY"])
        session_id = found["sessions"][0]["metadata"]["sessionId"]
        status, _ = service.post("CloseSession", token, sessionId=session_id, mode="FORCE")
        assert status == 200
        assert bash.run("echo another: $X").stdout == "another:\n"


def test_every_command_is_in_the_audit(service: RunningService) -> None:
    token = service.home.new_agent("audited")
    with holdfast.BashExecutor(service.grpc, token=token) as bash:
        bash.run("echo a-word-to-find")
    _, found = service.post("ListAudit", token, contains="a-word-to-find")
    assert {record["agentId"] for record in found["records"]} == {"audited"}


# --- the cost without sessions --------------------------------------------------------------------------------


def test_no_grpc_is_loaded_without_sessions() -> None:
    code = (
        "import sys, holdfast\n"
        "assert holdfast.ExecutionResult(stdout='', stderr='', exit_code=0).success\n"
        "bash = holdfast.BashExecutor(sessions=False)\n"
        "print([name for name in ('grpc', 'google.protobuf', 'sqlalchemy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_a_result_is_the_same_kind_from_both() -> None:
    assert holdfast.ExecutionResult is ExecutionResult
