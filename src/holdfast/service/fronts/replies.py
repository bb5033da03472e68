"""What the service answers, made into messages for the wire; pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from holdfast.secret_names import looks_secret
from holdfast.service.api import Chunk, CreateResult, InputResult, OutputRead, RunResult, SessionEvent, SessionView
from holdfast.service.types import Approval, AuditRow, Policy, Resources, Usage
from holdfast.session.v1 import session_pb2 as pb

#: A gRPC client takes messages of 4 MiB unless told otherwise, and what is around the output has its size, too.
LARGEST_REPLY: Final = 4 * 1024 * 1024 - 64 * 1024
_HIDDEN: Final = "[hidden]"
_LARGEST_UINT32: Final = 2**32 - 1


def timestamp(seconds: float) -> Timestamp:
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=min(999_999_999, int((seconds - whole) * 1e9)))


def token(value: str) -> pb.OutputToken:
    return pb.OutputToken(value=value)


def exit_code(code: int) -> int:
    """Shells say 128 and the signal's number of what a signal ended; the field has no negative numbers."""
    return code if code >= 0 else 128 - code


def metadata(view: SessionView) -> pb.SessionMetadata:
    record = view.record
    made = pb.SessionMetadata(
        session_id=record.session_id,
        agent_id=record.agent_id,
        kind=pb.SHELL if record.kind == "shell" else pb.TERMINAL,
        sandbox=record.sandbox,
        sandbox_mode=record.policy.sandbox_mode,
        initial_cwd=record.initial_cwd,
        cwd=view.cwd or record.initial_cwd,
        environment={name: shown_variable(name, value) for name, value in record.environment.items()},
        policy=_policy(record.policy),
        created_at=timestamp(record.created_at),
        last_activity_at=timestamp(record.last_activity_at),
        expires_at=timestamp(record.expires_at),
        labels=record.labels,
        cols=record.cols,
        rows=record.rows,
        enforced=record.enforced,
        unenforced=record.unenforced,
        commands_run=record.commands_run,
        shell=record.shell,
        close_reason=record.close_reason,
        summary=record.summary,
    )
    if record.closed_at is not None:
        made.closed_at.CopyFrom(timestamp(record.closed_at))
    if view.usage is not None:
        made.usage.CopyFrom(_usage(view.usage))
    return made


def shown_variable(name: str, value: str) -> str:
    """A variable's value, unless its name says that it is a secret."""
    return _HIDDEN if looks_secret(name) else value


def _policy(policy: Policy) -> pb.SessionPolicy:
    return pb.SessionPolicy(
        idle_timeout_seconds=_uint32(policy.idle_timeout),
        max_lifetime_seconds=_uint32(policy.max_lifetime),
        allow_background_processes=policy.allow_background,
        profile=policy.profile,
        require=policy.require,
        network=policy.network,
        resources=_resources(policy.resources),
    )


def _resources(limits: Resources) -> pb.ResourceLimits:
    return pb.ResourceLimits(
        cpu_cores=limits.cpu_cores or 0.0,
        cpu_seconds=limits.cpu_seconds or 0,
        memory_bytes=limits.memory_bytes or 0,
        processes=_uint32(limits.processes or 0),
        output_bytes=limits.output_bytes or 0,
        file_size_bytes=limits.file_size_bytes or 0,
    )


def _usage(usage: Usage) -> pb.ResourceUsage:
    return pb.ResourceUsage(
        process_count=usage.process_count,
        cpu_percent=usage.cpu_percent,
        cpu_seconds=usage.cpu_seconds,
        memory_bytes=usage.memory_bytes,
        read_bytes=usage.read_bytes,
        written_bytes=usage.written_bytes,
        session_idle=usage.session_idle,
        long_running_flag=usage.long_running,
        sampled_at=timestamp(usage.sampled_at),
    )


def _uint32(value: float) -> int:
    return int(min(max(value, 0), _LARGEST_UINT32))


def created(made: CreateResult) -> pb.CreateSessionResponse:
    return pb.CreateSessionResponse(
        session_id=made.view.record.session_id,
        prompt=made.view.prompt,
        metadata=metadata(made.view),
        token=token(made.token),
        state=made.view.state,
    )


def session(view: SessionView) -> pb.GetSessionResponse:
    return pb.GetSessionResponse(metadata=metadata(view), state=view.state)


def input_taken(taken: InputResult) -> pb.SendInputResponse:
    return pb.SendInputResponse(
        accepted=taken.accepted,
        command_id=taken.command_id,
        state=taken.state,
        approval_id=taken.approval_id,
        queue_busy=taken.queue_busy,
    )


def chunk(each: Chunk) -> pb.OutputChunk:
    made = pb.OutputChunk(
        session_id=each.session_id,
        token=token(each.token),
        payload=each.payload,
        truncated=each.truncated,
        state=each.state,
        timestamp=timestamp(each.at),
        stream=each.stream,
        command_id=each.command_id,
        skipped_bytes=each.skipped,
    )
    if each.exit_code is not None:
        made.exit_code = exit_code(each.exit_code)
    if each.prompt is not None:
        made.prompt.CopyFrom(
            pb.PromptInfo(
                text=each.prompt.text, awaiting_input=each.prompt.awaiting_input, password=each.prompt.password
            )
        )
    return made


def output(read: OutputRead) -> pb.ReadOutputResponse:
    """As many chunks as a client takes in one message; the rest is there at the token that is then given."""
    kept: list[pb.OutputChunk] = []
    size = 0
    for made in map(chunk, read.chunks):
        size += made.ByteSize() + 8
        if kept and size > LARGEST_REPLY:
            return pb.ReadOutputResponse(chunks=kept, state=read.state, token=kept[-1].token, more=True)
        kept.append(made)
    return pb.ReadOutputResponse(chunks=kept, state=read.state, token=token(read.token), more=read.more)


def event(each: SessionEvent) -> pb.SessionEvent:
    return pb.SessionEvent(
        session_id=each.session_id,
        type=each.type,
        detail=each.detail,
        token=each.token,
        timestamp=timestamp(each.at),
        approval_id=each.approval_id,
        state=each.state,
    )


def ran(result: RunResult) -> pb.RunCommandResponse:
    # The latest are kept, and stderr first: it is the one that says why something failed.
    stderr = result.stderr[-LARGEST_REPLY:]
    room = LARGEST_REPLY - len(stderr)
    stdout = result.stdout[-room:] if room else b""
    cut = len(stdout) < len(result.stdout) or len(stderr) < len(result.stderr)
    return pb.RunCommandResponse(
        command_id=result.command_id,
        exit_code=exit_code(result.exit_code),
        stdout=stdout,
        stderr=stderr,
        timed_out=result.timed_out,
        truncated=result.truncated or cut,
        duration_ms=max(0, round(result.duration * 1000)),
        state=result.state,
        cwd=result.cwd,
        approval_id=result.approval_id,
    )


def audit(rows: Iterable[AuditRow], next_page: str) -> pb.ListAuditResponse:
    records = [
        pb.AuditRecord(
            session_id=row.session_id,
            seq=row.seq,
            at=timestamp(row.at),
            agent_id=row.agent_id,
            kind=row.kind,
            command_id=row.command_id,
            body=row.body,
            hash=row.hash,
        )
        for row in rows
    ]
    return pb.ListAuditResponse(records=records, next_page_token=next_page)


def approvals(waiting: Iterable[Approval]) -> pb.ListApprovalsResponse:
    return pb.ListApprovalsResponse(
        approvals=[
            pb.Approval(
                approval_id=each.approval_id,
                session_id=each.session_id,
                agent_id=each.agent_id,
                command=each.command,
                reason=each.reason,
                asked_at=timestamp(each.asked_at),
                expires_at=timestamp(each.expires_at),
                outcome=each.outcome,
                answered_by=each.answered_by,
                comment=each.comment,
            )
            for each in waiting
        ]
    )
