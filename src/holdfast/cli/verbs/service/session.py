"""`holdfast session`: sessions of a service for operators and agents, through `ServiceClient`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Annotated, Any, Final, Literal, cast, get_args

import msgspec
import typer

from holdfast.cli.support.command_request import environment
from holdfast.cli.support.exit_codes import TIMED_OUT
from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.service_option import with_service
from holdfast.cli.support.text import age, complain, one_line, show_table
from holdfast.cli.verbs.service.session_attach import attach
from holdfast.errors import InvalidParams
from holdfast.service.api import CreateRequest, PolicyRequest
from holdfast.service.client.service_client import RETRY_SECONDS, ServiceClient
from holdfast.service.types import EventType, State

#: The largest that `RunCommand` returns.
_RUN_BYTES: Final = 4 * 1024 * 1024
_OPEN: Final[tuple[State, ...]] = ("RUNNING", "BUSY", "IDLE", "CLOSING", "UNKNOWN")

LabelOption = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")]
SandboxOption = Annotated[
    str, typer.Option("--sandbox", metavar="ADDR", help="A sandbox that the service allows; ENGINE:new; pool:NAME.")
]
CwdOption = Annotated[str, typer.Option("--cwd", metavar="DIR", help="Working directory in the sandbox.")]
EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable.")]
ProfileOption = Annotated[str, typer.Option("--profile", metavar="P", help="A profile of the service's rules.")]
CommentOption = Annotated[str, typer.Option("--comment", metavar="TEXT", help="For the audit log and the caller.")]


@with_service()
async def list_sessions(
    service: ServiceClient,
    agent: Annotated[str, typer.Option(metavar="ID", help="Of this agent; for operators.")] = "",
    label: LabelOption = None,
    all: Annotated[bool, typer.Option("--all", "-a", help="Also sessions that are over.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List the open sessions of the service that the token may see; the sub-verbs work on them."""
    found = await service.list_sessions(agent_id=agent, labels=_pairs(label), states=() if all else _OPEN)
    if as_json:
        print(json.dumps([_fields(each) for each in found]))
        return 0
    now = time.time()
    rows = [
        [
            each.session_id,
            each.agent_id,
            each.kind,
            each.state.lower(),
            age(now - each.created_at),
            each.sandbox,
            each.cwd or "-",
            " ".join(f"{name}={value}" for name, value in each.labels.items()) or "-",
        ]
        for each in found
    ]
    show_table(["ID", "AGENT", "KIND", "STATE", "AGE", "SANDBOX", "CWD", "LABELS"], rows)
    return 0


@with_service()
async def open_one(
    service: ServiceClient,
    kind: Annotated[
        Literal["terminal", "shell"], typer.Option(help="A terminal, or a shell without one.")
    ] = "terminal",
    sandbox: SandboxOption = "",
    cwd: CwdOption = "",
    env: EnvOption = None,
    shell: Annotated[str, typer.Option(metavar="PROGRAM", help="The shell, by name or path.")] = "",
    profile: ProfileOption = "",
    label: LabelOption = None,
    agent: Annotated[str, typer.Option(metavar="ID", help="The owner (default: the token's agent).")] = "",
    as_json: JsonOption = False,
) -> int:
    """Open a session and print its id. It stays until it is closed, or until a timeout of its policy."""
    made = await service.create_session(
        kind=kind,
        sandbox=sandbox,
        cwd=cwd,
        env=environment(env or [], here=False, tty=False),
        shell=shell,
        policy=PolicyRequest(profile=profile),
        labels=_pairs(label),
        agent_id=agent,
    )
    print(json.dumps(_fields(made)) if as_json else made.session_id)
    return 0


@with_service()
async def run(
    service: ServiceClient,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="One argument, in the shell's language.")],
    session: Annotated[
        str, typer.Option("--session", metavar="ID", help="In this session (default: one for this command).")
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="End it after S seconds; exit code 124.")
    ] = None,
    sandbox: SandboxOption = "",
    cwd: CwdOption = "",
    env: EnvOption = None,
    profile: ProfileOption = "",
    as_json: JsonOption = False,
) -> int:
    """Run a command in a session, print its output, and exit with its code.

    Without --session the service opens a shell for the command and closes it after. A command that needs an
    approval waits for it.
    """
    if session and (sandbox or cwd or env or profile):
        raise InvalidParams("--sandbox, --cwd, --env and --profile are for a new session: leave out --session")
    create = CreateRequest(
        kind="shell",
        sandbox=sandbox,
        initial_cwd=cwd,
        environment=environment(env or [], here=False, tty=False),
        policy=PolicyRequest(profile=profile),
    )
    done = await service.run_command(
        command, session, create=None if session else create, timeout=timeout, max_bytes=_RUN_BYTES
    )
    if as_json:
        print(json.dumps(_fields(done)))
    else:
        sys.stdout.buffer.write(done.stdout)
        sys.stdout.flush()
        sys.stderr.buffer.write(done.stderr)
        sys.stderr.flush()
        if done.truncated:
            complain("only the end of the output is shown")
    if done.timed_out:
        complain("the command timed out")
        return TIMED_OUT
    return done.exit_code


@with_service(RETRY_SECONDS)
async def watch(
    service: ServiceClient,
    session_id: Annotated[str, typer.Argument(metavar="[ID]", help="Of this session (default: all).")] = "",
    output: Annotated[bool, typer.Option("--output", help="Print the output of the session instead.")] = False,
    type: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="This type; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print events as they happen, one for each line, until Ctrl-C; or the output of a session until it ends.

    A lost connection is opened again, and the stream continues after the last event or byte.
    """
    if output:
        if not session_id:
            raise InvalidParams("--output needs the ID of a session")
        async with contextlib.aclosing(service.stream_output(session_id)) as chunks:
            async for chunk in chunks:
                if as_json:
                    print(json.dumps(_fields(chunk)), flush=True)
                else:
                    sys.stdout.buffer.write(chunk.payload)
                    sys.stdout.buffer.flush()
        return 0
    if session_id:
        await service.get_session(session_id)
    async with contextlib.aclosing(service.events(session_id, types=_event_types(type))) as events:
        async for event in events:
            if as_json:
                print(json.dumps(_fields(event)), flush=True)
                continue
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.timestamp))
            parts = [when, event.session_id, event.type, event.approval_id, one_line(event.detail)]
            print("  ".join(part for part in parts if part), flush=True)
    return 0


@with_service()
async def approve(
    service: ServiceClient,
    approval_id: Annotated[
        str, typer.Argument(metavar="[APPROVAL]", help="Its id (default: list those that wait).")
    ] = "",
    comment: CommentOption = "",
    as_json: JsonOption = False,
) -> int:
    """Approve a command that waits; without an id, list the commands that wait for an approval."""
    if approval_id:
        return await _answer(service, approval_id, True, comment, as_json)
    waiting = await service.list_approvals()
    if as_json:
        print(json.dumps([_fields(each) for each in waiting]))
        return 0
    now = time.time()
    show_table(
        ["APPROVAL", "SESSION", "AGENT", "EXPIRES", "COMMAND"],
        [
            [each.approval_id, each.session_id, each.agent_id, age(each.expires_at - now), each.command]
            for each in waiting
        ],
        wrap=True,  # a command that is approved must be shown in full
    )
    return 0


@with_service()
async def deny(
    service: ServiceClient,
    approval_id: Annotated[str, typer.Argument(metavar="APPROVAL", help="Its id.")],
    comment: CommentOption = "",
    as_json: JsonOption = False,
) -> int:
    """Refuse a command that waits for an approval."""
    return await _answer(service, approval_id, False, comment, as_json)


async def _answer(service: ServiceClient, approval_id: str, approve: bool, comment: str, as_json: bool) -> int:
    outcome = await service.answer_approval(approval_id, approve, comment=comment)
    print(json.dumps({"approvalId": approval_id, "outcome": outcome}) if as_json else outcome)
    return 0


@with_service()
async def preview(
    service: ServiceClient,
    session_id: Annotated[str, typer.Argument(metavar="ID", help="A session.")],
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65_535, help="A port of its sandbox.")],
    lifetime: Annotated[
        float | None, typer.Option(metavar="S", min=1, help="Seconds (default: the service's limit).")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Open a port of a session's sandbox to browsers and print the URL, which is a secret: it has a ticket."""
    made = await service.create_preview(session_id, port, lifetime=lifetime)
    print(json.dumps(_fields(made)) if as_json else made.url)
    return 0


@with_service()
async def close(
    service: ServiceClient,
    session_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Sessions.")],
    force: Annotated[bool, typer.Option("--force", help="Kill at once.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Close sessions and end what they run; prints the summary of each."""
    for session_id in session_ids:
        closed = await service.close_session(session_id, force=force)
        if as_json:
            print(json.dumps({"sessionId": session_id, "state": closed.state, "summary": closed.summary}))
        else:
            print(f"{session_id}  {closed.summary}")
    return 0


@with_service()
async def audit(
    service: ServiceClient,
    session_id: Annotated[str, typer.Argument(metavar="[ID]", help="Of this session (default: all).")] = "",
    agent: Annotated[str, typer.Option(metavar="ID", help="Of this agent.")] = "",
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Of this kind; may be repeated.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not before: 10m, 2h, 3d, a date, @SECONDS.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before.")] = None,
    contains: Annotated[str, typer.Option(metavar="TEXT", help="With this text.")] = "",
    as_json: JsonOption = False,
) -> int:
    """Print rows of the audit log through the service, oldest first; `holdfast audit` reads the database."""
    from holdfast.service.audit import playback

    now = time.time()
    rows = service.audit(
        session_id,
        agent_id=agent,
        kinds=tuple(kind or ()),
        since=None if since is None else playback.moment(since, now),
        until=None if until is None else playback.moment(until, now),
        contains=contains,
    )
    async with contextlib.aclosing(rows) as found:
        async for row in found:
            # The protocol does not have the hash of the row before.
            fields = {name: value for name, value in playback.fields(row).items() if name != "previous"}
            print(json.dumps(fields, ensure_ascii=False) if as_json else playback.line(row))
    return 0


command = list_sessions
SUB_VERBS: Final = {
    "list": list_sessions,
    "open": open_one,
    "run": run,
    "attach": attach,
    "watch": watch,
    "approve": approve,
    "deny": deny,
    "preview": preview,
    "close": close,
    "audit": audit,
}


def _event_types(names: list[str] | None) -> tuple[EventType, ...]:
    for name in names or ():
        if name not in get_args(EventType):
            raise InvalidParams(f"--type {name!r}: give one of {', '.join(get_args(EventType))}")
    return cast("tuple[EventType, ...]", tuple(names or ()))


def _pairs(assignments: list[str] | None) -> dict[str, str]:
    made = {}
    for each in assignments or ():
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise InvalidParams(f"--label {each!r}: give NAME=VALUE")
        made[name] = value
    return made


def _fields(value: Any) -> Any:
    """Return a Struct as an object for `--json`, with names in camelCase and output as text."""
    if isinstance(value, msgspec.Struct):
        return {_camel(name): _fields(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return [_fields(each) for each in value] if isinstance(value, tuple | list) else value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(each.capitalize() for each in rest)
