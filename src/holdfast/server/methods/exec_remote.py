"""The `exec_remote_*` methods: jobs by OS pid, polled for new output. Translates to the exec interface.

The reply to a poll may be lost, so each reply has a `seq`, and output after the acknowledged reply is sent again.
A caller that acknowledges nothing gets the output since its last poll.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import secrets
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import HoldfastError, InvalidParams, StdinClosed, UnknownProcess
from holdfast.types import EnvPolicy, ProcessSpec
from holdfast.wire.exec_remote_messages import (
    ExecRemoteDone,
    ExecRemotePidParams,
    ExecRemotePollParams,
    ExecRemotePollResult,
    ExecRemoteStartParams,
    ExecRemoteStartResult,
    ExecRemoteWriteParams,
)

if TYPE_CHECKING:
    from holdfast.runtime.output.output_log import OutputLog
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.server.connection import ServerConnection
    from holdfast.server.served_exec import ServedExec

#: The shell that runs commands: bash, because callers write for it; /bin/sh where bash is missing.
SHELLS: Final = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
#: Text of each stream in one reply.
POLL_BYTES: Final = 4 * 1024 * 1024
#: The environment is the server's with the caller's variables over it.
_INHERIT: Final = EnvPolicy(inherit="all", ignore_default_excludes=True)


class _Job:
    """One job: the offsets of stdout and stderr up to which output was sent, and was acknowledged."""

    def __init__(self, process_id: str) -> None:
        self.process_id = process_id
        self.killed = False
        self.seq = 0
        self.sent = (0, 0)
        self.acknowledged = (0, 0)
        #: Whether the reply with number `seq` reported the end.
        self.end_sent = False
        self.feeding: asyncio.Task[None] | None = None


class ExecRemoteMethods:
    """The handlers of `exec_remote_*`, and the jobs of one server by pid."""

    def __init__(self, exec_: ServedExec) -> None:
        self._exec = exec_
        self._jobs: dict[int, _Job] = {}
        self._shell = next((shell for shell in SHELLS if os.access(shell, os.X_OK)), SHELLS[-1])

    async def start(self, connection: ServerConnection, params: ExecRemoteStartParams) -> ExecRemoteStartResult:
        process_id = f"exec_remote-{secrets.token_hex(6)}"
        process = await self._exec.processes.start(
            ProcessSpec(
                process_id=process_id,
                argv=(self._shell, "-c", params.command),
                cwd=params.cwd,
                env=params.env or {},
                env_policy=_INHERIT,
                user=params.user,
                pipe_stdin=params.input is not None or params.stdin_open,
            )
        )
        self._forget_dropped()
        job = self._jobs[process.pid] = _Job(process_id)
        if params.input is not None:
            # In the background: a command that does not read its input must not hold up its start.
            job.feeding = asyncio.get_running_loop().create_task(
                self._feed(process_id, params.input.encode(), close=not params.stdin_open)
            )
        return ExecRemoteStartResult(process.pid)

    async def poll(self, connection: ServerConnection, params: ExecRemotePollParams) -> ExecRemotePollResult:
        job = self._job(params.pid)
        # The caller has not received the last reply. It gets that reply's number again, however often it repeats.
        repeated = params.ack_seq is not None and params.ack_seq == job.seq - 1
        if params.ack_seq is None or params.ack_seq == job.seq:
            job.acknowledged = job.sent
            if job.end_sent:
                # The caller has received the end, so the job can be forgotten.
                await self._remove(params.pid)
                raise self._unknown(params.pid)
        elif not repeated:
            raise InvalidParams(f"ack_seq {params.ack_seq}: the last reply was {job.seq}")
        process = self._exec.processes.process(job.process_id)
        (stdout, stdout_end), (stderr, stderr_end) = _new_text(process, job)
        if params.wait_ms > 0 and process.running and not stdout and not stderr:
            # Waits by `seq` rather than by offset: the first byte of a character alone gives no text to send.
            await self._exec.read(
                job.process_id, after_seq=process.journal.last_seq, max_bytes=1, wait=params.wait_ms / 1000
            )
            (stdout, stdout_end), (stderr, stderr_end) = _new_text(process, job)
        ended = process.status is not None
        more = stdout_end < process.logs[0].end or stderr_end < process.logs[1].end
        job.sent = (stdout_end, stderr_end)
        job.seq += not repeated
        job.end_sent = ended and not more
        state: Literal["running", "completed", "killed"] = "running"
        exit_code = None
        if job.end_sent and process.status is not None:
            state = "killed" if job.killed else "completed"
            exit_code = None if job.killed else process.status.exit_code
        result = ExecRemotePollResult(state=state, stdout=stdout, stderr=stderr, seq=job.seq, exit_code=exit_code)
        if job.end_sent and params.ack_seq is None:
            await self._remove(params.pid)
        return result

    async def kill(self, connection: ServerConnection, params: ExecRemotePidParams) -> ExecRemoteDone:
        """End the whole tree and drop unsent output; later polls return neither output nor exit code."""
        job = self._job(params.pid)
        if job.feeding is not None:
            job.feeding.cancel()
        was_running = await self._exec.terminate(job.process_id)
        if was_running:
            job.killed = True
            process = self._exec.processes.process(job.process_id)
            job.sent = job.acknowledged = (process.logs[0].end, process.logs[1].end)
        return ExecRemoteDone(True, "killed" if was_running else "it had ended already")

    async def write_stdin(self, connection: ServerConnection, params: ExecRemoteWriteParams) -> ExecRemoteDone:
        await self._exec.write(self._job(params.pid).process_id, params.data.encode())
        return ExecRemoteDone(True)

    async def close_stdin(self, connection: ServerConnection, params: ExecRemotePidParams) -> ExecRemoteDone:
        await self._exec.close_stdin(self._job(params.pid).process_id)
        return ExecRemoteDone(True)

    async def _feed(self, process_id: str, data: bytes, *, close: bool) -> None:
        try:
            await self._exec.write(process_id, data)
            if close:
                await self._exec.close_stdin(process_id)
        except (StdinClosed, UnknownProcess):
            return  # a command may exit, or close its stdin, before it has read everything

    def _job(self, pid: int) -> _Job:
        job = self._jobs.get(pid)
        if job is None or not self._exec.processes.is_known(job.process_id):
            raise self._unknown(pid)
        return job

    def _unknown(self, pid: int) -> HoldfastError:
        return UnknownProcess(f"no job has the pid {pid}")

    async def _remove(self, pid: int) -> None:
        job = self._jobs.pop(pid)
        if self._exec.processes.is_known(job.process_id):
            await self._exec.forget(job.process_id)

    def _forget_dropped(self) -> None:
        """Drop jobs of processes that are no longer retained."""
        self._jobs = {pid: job for pid, job in self._jobs.items() if self._exec.processes.is_known(job.process_id)}


def _new_text(process: ManagedProcess, job: _Job) -> tuple[tuple[str, int], tuple[str, int]]:
    """Unacknowledged text of stdout and of stderr, each with the offset of its end."""
    ended = process.status is not None
    return (
        _text(process.logs[0], job.acknowledged[0], whole=ended),
        _text(process.logs[1], job.acknowledged[1], whole=ended),
    )


def _text(log: OutputLog, start: int, *, whole: bool) -> tuple[str, int]:
    """Text from `start` on and the offset of its end, which is before a character that is not complete yet.

    Lost bytes are skipped; bytes that are not UTF-8 become U+FFFD.
    """
    if log.truncated and log.lost_start <= start < log.lost_end:
        start = log.lost_end
    data = log.read(start, POLL_BYTES)
    stop = start + len(data)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=whole and stop >= log.end)
    return text, stop - len(decoder.getstate()[0])
