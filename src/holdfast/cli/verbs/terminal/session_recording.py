"""Reads the recording of a session as an asciicast: from the service, or from the session's sandbox.

The service, which needs a token, has sessions of both kinds. From the database alone, the sandbox of a terminal is
read from the session's row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.cli.support.typed_verb import service_extra
from holdfast.client.screen.asciicast import OUTPUT, CastEvent, write_cast
from holdfast.errors import HoldfastError, InvalidParams, UnknownTerminal
from holdfast.service.client.endpoint import TOKEN_VARIABLE, endpoint
from holdfast.service.problems import Problem

if TYPE_CHECKING:
    from holdfast.session.v1 import session_pb2 as pb

#: Bytes of one read: the service's maximum.
_PIECE: Final = 4 * 1024 * 1024


def from_service(address: str, session_id: str, tls_ca: str | None = None) -> str:
    """Return the recording of a session that the service has retained."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InvalidParams(f"--service {address}: set {TOKEN_VARIABLE} to a token of the session's owner")
    with service_extra():
        from holdfast.service.client.rpc import BlockingCaller, RpcCall
        from holdfast.session.v1 import session_pb2 as pb

    caller = BlockingCaller(endpoint(address, token, tls_ca=tls_ca))
    try:
        found = caller.call(RpcCall("GetSession", pb.GetSessionRequest(session_id=session_id))).metadata
        chunks: list[pb.OutputChunk] = []
        since = pb.OutputToken()
        while True:
            request = pb.ReadOutputRequest(session_id=session_id, since=since, max_bytes=_PIECE)
            read = caller.call(RpcCall("ReadOutput", request))
            chunks += read.chunks
            if not read.more:
                break
            since = read.token
    except Problem as problem:
        problem.message = f"service {address}: {problem.message}"
        raise
    finally:
        caller.close()
    return "".join(
        write_cast(
            _events(found, chunks),
            width=found.cols or 80,
            height=found.rows or 24,
            timestamp=found.created_at.seconds,
            title=session_id,
            command=found.shell or None,
        )
    )


def _events(found: pb.SessionMetadata, chunks: list[pb.OutputChunk]) -> Iterator[CastEvent]:
    from holdfast.session.v1 import session_pb2 as pb

    began = found.created_at.seconds + found.created_at.nanos / 1e9
    for chunk in chunks:
        at = max(0.0, chunk.timestamp.seconds + chunk.timestamp.nanos / 1e9 - began)
        data = chunk.payload
        if found.kind == pb.SHELL:
            # A shell has no terminal that turns a line feed into a new line.
            data = data.replace(b"\n", b"\r\n")
        if data:
            yield CastEvent(at, OUTPUT, data)


async def from_store(url: str | None, session_id: str, *, input: bool) -> str:
    """Return the recording of a session's terminal, by the database; `NotFound` if that has no such session."""
    from holdfast.client.opening import connect
    from holdfast.service.settings import load_settings

    with service_extra():
        from holdfast.service.store import open_store

    async with await open_store(load_settings(store=url), read_only=True) as store:
        record = await store.session(session_id)
    if record.kind != "terminal":
        raise InvalidParams(f"{session_id}: a shell has no terminal to record; with --service its output is played")
    async with connect(record.sandbox) as box:
        try:
            terminal = await box.open_terminal(session_id)
        except UnknownTerminal:
            raise HoldfastError(
                f"{session_id}: {record.sandbox} no longer retains the output of this session"
            ) from None
        return await terminal.recording(input=input)
