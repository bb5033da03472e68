"""Messages in, calls of the service, messages out: every field checked, and none lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from holdfast.service.api import (
    AuditFilter,
    Chunk,
    Control,
    CreateRequest,
    InputResult,
    OutputRead,
    PolicyRequest,
    PromptInfo,
    RunResult,
    SessionEvent,
)
from holdfast.service.fronts import replies, requests
from holdfast.service.fronts.handler import Handler, methods
from holdfast.service.problems import Denied, Invalid, NotFound
from holdfast.service.types import Approval, AuditRow, Caller, Resources, SessionRecord
from holdfast.session.v1 import session_pb2 as pb

from .fake_sessions import FakeSessions, chunk, record

ANNA = Caller("anna")
OLGA = Caller("olga", "operator")


def handler() -> tuple[Handler, FakeSessions]:
    sessions = FakeSessions()
    return Handler(sessions), sessions


def test_every_method_of_the_protocol_has_its_function() -> None:
    found = {method.name: method for method in methods()}
    assert set(found) == {method.name for method in pb.DESCRIPTOR.services_by_name["SessionService"].methods}
    made, _ = handler()
    for method in found.values():
        assert callable(made.stream(method) if method.stream else made.unary(method))
    streams = {"StreamOutput", "StreamTerminal", "SubscribeSessionEvents", "WatchSessions"}
    assert {name for name, method in found.items() if method.stream} == streams
    assert found["GetSession"].path == "/holdfast.session.v1.SessionService/GetSession"


async def test_create_session_carries_every_field_both_ways() -> None:
    made, sessions = handler()
    request = pb.CreateSessionRequest(
        agent_id="anna",
        initial_cwd="/work",
        environment={"LANG": "C"},
        policy=pb.SessionPolicy(
            idle_timeout_seconds=60,
            max_lifetime_seconds=600,
            allow_background_processes=True,
            inherit_agent_workspace=True,
            profile="strict",
            require=["filesystem", "network", "filesystem"],
            network="allow-list",
            resources=pb.ResourceLimits(
                cpu_cores=1.5, cpu_seconds=2, memory_bytes=3, processes=4, output_bytes=5, file_size_bytes=6
            ),
        ),
        kind=pb.SHELL,
        sandbox="docker:box",
        shell="zsh",
        cols=100,
        rows=30,
        request_id="r-1",
        labels={"task": "a b"},
    )
    reply = await made.create_session(ANNA, request)
    [(name, caller, (requested,))] = sessions.calls
    assert (name, caller) == ("create", ANNA)
    assert requested == CreateRequest(
        agent_id="anna",
        initial_cwd="/work",
        environment={"LANG": "C"},
        policy=PolicyRequest(
            profile="strict",
            idle_timeout=60.0,
            max_lifetime=600.0,
            allow_background=True,
            inherit_workspace=True,
            require=("filesystem", "network"),
            network="allow-list",
            resources=Resources(1.5, 2, 3, 4, 5, 6),
        ),
        kind="shell",
        sandbox="docker:box",
        shell="zsh",
        cols=100,
        rows=30,
        request_id="r-1",
        labels={"task": "a b"},
    )
    assert (reply.session_id, reply.prompt, reply.token.value, reply.state) == ("s1", "$ ", "00000010", pb.IDLE)
    assert reply.metadata.agent_id == "anna"
    assert reply.metadata.created_at.ToNanoseconds() == 1_000_250_000_000
    assert reply.metadata.expires_at.seconds == 4600


async def test_what_is_left_out_has_the_default_that_the_protocol_names() -> None:
    made, sessions = handler()
    await made.create_session(ANNA, pb.CreateSessionRequest())
    await made.read_output(ANNA, pb.ReadOutputRequest(session_id="s1"))
    await made.list_sessions(ANNA, pb.ListSessionsRequest())
    (_, _, (created,)), (_, _, read), (_, _, found) = sessions.calls
    assert created == CreateRequest()
    assert read == ("s1", "", 64 * 1024, 0.0)
    assert found == ("", (), {}, 100, "")


async def test_sizes_waits_and_pages_are_capped() -> None:
    made, sessions = handler()
    most = 2**32 - 1
    await made.read_output(ANNA, pb.ReadOutputRequest(session_id="s1", max_bytes=most, wait_timeout_ms=most))
    await made.list_sessions(ANNA, pb.ListSessionsRequest(page_size=most))
    await made.list_audit(ANNA, pb.ListAuditRequest(page_size=most))
    await made.run_command(ANNA, pb.RunCommandRequest(command="ls", max_bytes=most, timeout_ms=1_500))
    (_, _, read), (_, _, found), (_, _, audited), (_, _, (ran,)) = sessions.calls
    assert read[2] <= 4 * 1024 * 1024
    assert read[3] == 60.0
    assert found[3] == audited[1] == 1_000
    assert (ran.max_bytes, ran.timeout) == (4 * 1024 * 1024, 1.5)


# Any: numbers that an enum does not have go over the wire all the same.
CREATE: Any = pb.CreateSessionRequest
SEND: Any = pb.SendInputRequest
ACTION: Any = pb.ControlAction
LIST: Any = pb.ListSessionsRequest
CLOSE: Any = pb.CloseSessionRequest
SUBSCRIBE: Any = pb.SubscribeSessionEventsRequest


def limits(**fields: Any) -> pb.SessionPolicy:
    return pb.SessionPolicy(resources=pb.ResourceLimits(**fields))


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("get_session", pb.GetSessionRequest(), "session_id"),
        ("get_session", pb.GetSessionRequest(session_id="a b"), "session_id"),
        ("get_session", pb.GetSessionRequest(session_id="a\n"), "session_id"),
        ("get_session", pb.GetSessionRequest(session_id="x" * 257), "session_id"),
        ("create_session", CREATE(initial_cwd="/" + "a" * 4096), "initial_cwd"),
        ("create_session", CREATE(initial_cwd="/a\0b"), "initial_cwd"),
        ("create_session", CREATE(agent_id="an na"), "agent_id"),
        ("create_session", CREATE(environment={"A=B": "1"}), "environment"),
        ("create_session", CREATE(environment={"": "1"}), "environment"),
        ("create_session", CREATE(environment={"A": "1\0"}), "environment['A']"),
        ("create_session", CREATE(environment={"A": "x" * 131_073}), "environment['A']"),
        ("create_session", CREATE(environment={f"A{i}": "x" * 131_000 for i in range(9)}), "environment"),
        ("create_session", CREATE(environment={f"A{i}": "" for i in range(1_001)}), "environment"),
        ("create_session", CREATE(labels={f"a{i}": "" for i in range(65)}), "labels"),
        ("create_session", CREATE(labels={"a": "two\nlines"}), "labels['a']"),
        ("create_session", CREATE(kind=9), "kind"),
        ("create_session", CREATE(cols=1_001), "cols"),
        ("create_session", CREATE(rows=70_000), "rows"),
        ("create_session", CREATE(sandbox="a\nb"), "sandbox"),
        ("create_session", CREATE(policy=pb.SessionPolicy(require=["filesystem", "magic"])), "policy.require[1]"),
        ("create_session", CREATE(policy=pb.SessionPolicy(network="some")), "policy.network"),
        ("create_session", CREATE(policy=limits(cpu_cores=-1)), "policy.resources.cpu_cores"),
        ("create_session", CREATE(policy=limits(cpu_cores=float("nan"))), "policy.resources.cpu_cores"),
        ("create_session", CREATE(policy=limits(memory_bytes=2**63)), "policy.resources.memory_bytes"),
        ("send_input", SEND(session_id="s1"), "data"),
        ("send_input", SEND(session_id="s1", data=b"x" * (4 * 2**20 + 1)), "data"),
        ("send_input", SEND(session_id="s1", actions=[ACTION(type=77)]), "actions[0].type"),
        (
            "send_input",
            SEND(
                session_id="s1",
                actions=[ACTION(type=ACTION.CTRL_C), ACTION(type=ACTION.RESIZE, cols=80)],
            ),
            "actions[1]",
        ),
        ("send_input", SEND(session_id="s1", actions=[ACTION()] * 101), "actions"),
        ("read_output", pb.ReadOutputRequest(session_id="s1", since=pb.OutputToken(value="x y")), "since.value"),
        ("list_sessions", LIST(states=[99]), "states[0]"),
        ("close_session", CLOSE(session_id="s1", mode=5), "mode"),
        ("run_command", pb.RunCommandRequest(session_id="s1", command=" \n"), "command"),
        ("run_command", pb.RunCommandRequest(command="ls\0"), "command"),
        ("run_command", pb.RunCommandRequest(command="x" * (2**20 + 1)), "command"),
        ("run_command", pb.RunCommandRequest(command="ls", session_id="s1", create=CREATE()), "create"),
        ("run_command", pb.RunCommandRequest(command="ls", create=CREATE(cols=5_000)), "create.cols"),
        ("list_audit", pb.ListAuditRequest(kinds=["a b"]), "kinds[0]"),
        ("list_audit", pb.ListAuditRequest(since=Timestamp(seconds=2), until=Timestamp(seconds=1)), "until"),
        ("list_audit", pb.ListAuditRequest(since=Timestamp(seconds=1, nanos=-5)), "since"),
        ("list_audit", pb.ListAuditRequest(since=Timestamp(seconds=2**62)), "since"),
        ("answer_approval", pb.AnswerApprovalRequest(approve=True), "approval_id"),
        ("answer_approval", pb.AnswerApprovalRequest(approval_id="a", comment="x" * 5_000), "comment"),
    ],
)
async def test_a_field_that_cannot_be_used_is_named(method: str, request_: Any, field: str) -> None:
    made, sessions = handler()
    with pytest.raises(Invalid) as refused:
        await getattr(made, method)(ANNA, request_)
    assert refused.value.reason == "INVALID_FIELD"
    assert refused.value.details["field"] == field
    assert field in refused.value.message
    assert sessions.calls == []


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("stream_output", pb.StreamOutputRequest(), "session_id"),
        ("stream_output", pb.StreamOutputRequest(session_id="s1", since=pb.OutputToken(value="é")), "since.value"),
        ("subscribe_session_events", SUBSCRIBE(types=[50]), "types[0]"),
    ],
)
async def test_streams_check_their_fields_too(method: str, request_: Any, field: str) -> None:
    made, _ = handler()
    with pytest.raises(Invalid) as refused:
        await anext(getattr(made, method)(ANNA, request_))
    assert refused.value.details["field"] == field


def test_bytes_that_are_no_message_and_text_that_is_not_utf8_are_the_callers_error() -> None:
    for data in (b"\xff\xff\xff", b"\x0a\x02\xc3\x28"):
        with pytest.raises(Invalid) as refused:
            requests.parse(pb.GetSessionRequest, data)
        assert refused.value.reason == "MALFORMED_REQUEST"


async def test_only_an_operator_names_another_agent() -> None:
    made, sessions = handler()
    for call in (
        made.create_session(ANNA, pb.CreateSessionRequest(agent_id="ben")),
        made.run_command(ANNA, pb.RunCommandRequest(command="ls", create=pb.CreateSessionRequest(agent_id="ben"))),
        made.list_sessions(ANNA, pb.ListSessionsRequest(agent_id="ben")),
        made.list_audit(ANNA, pb.ListAuditRequest(agent_id="ben")),
    ):
        with pytest.raises(Denied):
            await call
    assert sessions.calls == []
    reply = await made.create_session(OLGA, pb.CreateSessionRequest(agent_id="ben"))
    assert reply.metadata.agent_id == "ben"


async def test_other_peoples_sessions_read_as_none() -> None:
    made, _ = handler()
    with pytest.raises(NotFound) as other:
        await made.get_session(ANNA, pb.GetSessionRequest(session_id="s2"))
    with pytest.raises(NotFound) as none:
        await made.get_session(ANNA, pb.GetSessionRequest(session_id="s3"))
    assert other.value.message.replace("s2", "s3") == none.value.message
    assert (await made.get_session(OLGA, pb.GetSessionRequest(session_id="s2"))).metadata.agent_id == "ben"


async def test_input_and_control_actions_arrive_in_their_order() -> None:
    made, sessions = handler()
    act = pb.ControlAction
    reply = await made.send_input(
        ANNA,
        pb.SendInputRequest(
            session_id="s1",
            data=b"\x1b[A\xff",
            actions=[act(type=act.CTRL_C), act(type=act.RESIZE, cols=10, rows=20), act(type=act.SIGKILL)],
            request_id="once",
        ),
    )
    [(_, _, requested)] = sessions.calls
    controls = (Control("CTRL_C"), Control("RESIZE", 10, 20), Control("SIGKILL"))
    assert requested == ("s1", b"\x1b[A\xff", controls, "once")
    assert (reply.accepted, reply.command_id, reply.state) == (True, "c1", pb.BUSY)


async def test_output_keeps_its_tokens_prompts_and_exit_codes() -> None:
    made, sessions = handler()
    sessions.answers["read_output"] = OutputRead(
        (
            chunk(b"\xff", "1", skipped_bytes=7, truncated=True, stream="stderr", command_id="c"),
            chunk(b"", "2", exit_code=-9, prompt=PromptInfo("$ ", awaiting_input=True, password=True)),
        ),
        "BUSY",
        "2",
        more=True,
    )
    reply = await made.read_output(ANNA, pb.ReadOutputRequest(session_id="s1", since=pb.OutputToken(value="0")))
    first, second = reply.chunks
    assert (first.payload, first.token.value, first.skipped_bytes, first.truncated) == (b"\xff", "1", 7, True)
    assert (first.stream, first.command_id, first.HasField("exit_code")) == ("stderr", "c", False)
    assert (second.exit_code, second.prompt.text, second.prompt.password) == (137, "$ ", True)
    assert (reply.token.value, reply.more, reply.state) == ("2", True, pb.BUSY)


@pytest.mark.parametrize(
    ("kind", "source", "computed"),
    [
        (pb.OutputChunk, Chunk, set()),
        (pb.PromptInfo, PromptInfo, set()),
        (pb.SendInputResponse, InputResult, set()),
        (pb.SessionEvent, SessionEvent, set()),
        (pb.AuditRecord, AuditRow, set()),
        (pb.Approval, Approval, set()),
        (pb.ResourceLimits, Resources, set()),
        (pb.RunCommandResponse, RunResult, {"duration_ms"}),
        (pb.SessionMetadata, SessionRecord, {"sandbox_mode", "cwd", "usage"}),
    ],
)
def test_every_field_of_a_reply_is_copied_or_computed(kind: Any, source: Any, computed: set[str]) -> None:
    fields = {field.name for field in kind.DESCRIPTOR.fields}
    assert {name for name in fields if not hasattr(source, name)} == computed


def test_a_reply_that_would_be_larger_than_clients_take_ends_at_a_token() -> None:
    chunks = tuple(chunk(b"x" * 200, f"{index:08d}") for index in range(20_000))
    reply = replies.output(OutputRead(chunks, "IDLE", "00019999"))
    assert reply.ByteSize() < 4 * 1024 * 1024
    assert reply.more
    assert 0 < len(reply.chunks) < 20_000
    assert reply.token.value == reply.chunks[-1].token.value == f"{len(reply.chunks) - 1:08d}"


async def test_a_commands_output_is_cut_to_what_clients_take_and_says_so() -> None:
    made, sessions = handler()
    sessions.answers["run_command"] = RunResult("c", -15, b"o" * 2**22, b"e" * 2**21 + b"!", 1.0006, "IDLE")
    reply = await made.run_command(ANNA, pb.RunCommandRequest(command="ls"))
    assert reply.ByteSize() < 4 * 1024 * 1024
    assert (reply.truncated, reply.stderr[-1:], len(reply.stderr)) == (True, b"!", 2**21 + 1)
    assert (reply.exit_code, reply.duration_ms) == (143, 1001)


async def test_variables_whose_names_say_secret_are_not_shown() -> None:
    made, sessions = handler()
    sessions.sessions["s1"] = record(environment={"LANG": "C", "api_key": "v", "GH_TOKEN": "v", "DB_PASSWORD": "v"})
    shown = (await made.get_session(ANNA, pb.GetSessionRequest(session_id="s1"))).metadata.environment
    assert dict(shown) == {"LANG": "C", "api_key": "[hidden]", "GH_TOKEN": "[hidden]", "DB_PASSWORD": "[hidden]"}


async def test_a_closed_session_says_when_and_why() -> None:
    made, sessions = handler()
    sessions.sessions["s1"] = record(state="CLOSED", closed_at=2000.0, close_reason="idle", summary="3 commands")
    metadata = (await made.get_session(ANNA, pb.GetSessionRequest(session_id="s1"))).metadata
    assert (metadata.closed_at.seconds, metadata.close_reason, metadata.summary) == (2000, "idle", "3 commands")
    assert metadata.usage.process_count == 2


async def test_events_audit_and_approvals_come_through() -> None:
    made, sessions = handler()
    subscribe = pb.SubscribeSessionEventsRequest(
        session_id="s1", since="s1:6", types=[pb.SessionEvent.IDLE_WARNING]
    )
    [event] = [each async for each in made.subscribe_session_events(ANNA, subscribe)]
    assert (event.type, event.token, event.state) == (pb.SessionEvent.IDLE_WARNING, "s1:7", pb.IDLE)
    since = Timestamp(seconds=1, nanos=500_000_000)
    audit = await made.list_audit(ANNA, pb.ListAuditRequest(session_id="s1", kinds=["input"], since=since))
    assert (audit.records[0].body, audit.records[0].hash, audit.next_page_token) == (
        '{"data":"ls"}',
        "f00d",
        "next",
    )
    waiting = await made.list_approvals(ANNA, pb.ListApprovalsRequest())
    assert waiting.approvals[0].expires_at.seconds == 310
    answered = await made.answer_approval(OLGA, pb.AnswerApprovalRequest(approval_id="a1", approve=True))
    assert answered.outcome == "approved"
    closed = await made.close_session(ANNA, pb.CloseSessionRequest(session_id="s1", mode=pb.FORCE))
    assert (closed.final_state, closed.summary) == (pb.CLOSED, "1 command")
    requested = {name: arguments for name, _, arguments in sessions.calls}
    assert requested["events"] == ("s1", "s1:6", ("IDLE_WARNING",))
    assert requested["audit"][0] == AuditFilter(session_id="s1", kinds=("input",), since=1.5)
    assert requested["close"] == ("s1", "force")


async def test_a_stream_that_is_left_closes_what_it_reads_from() -> None:
    made, sessions = handler()
    stream = made.stream_output(ANNA, pb.StreamOutputRequest(session_id="s1"))
    assert (await anext(stream)).payload == b"line 0\n"
    assert sessions.open == 1
    await stream.aclose()  # type: ignore[attr-defined]
    assert sessions.open == 0
