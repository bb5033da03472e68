"""Resources: the kept output of a process, and the recording of a terminal in asciicast v2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ToolError

from holdfast.client.collect import HeadTailBuffer

if TYPE_CHECKING:
    from holdfast.integrations.mcp.server import SandboxServer

_LOG: Final = "holdfast://{sandbox}/processes/{process_id}/log"
_RECORDING: Final = "holdfast://{sandbox}/terminals/{terminal_id}/recording"
#: Bytes of a resource: more than a model reads, and below the 1 MiB of a message that clients of the SDK read.
MAX_RESOURCE_BYTES: Final = 512 * 1024


def log_uri(sandbox: str, process_id: str) -> str:
    return _LOG.format(sandbox=sandbox, process_id=quote(process_id, safe=""))


def add_to(server: SandboxServer) -> None:
    """Add the resources to a server."""

    async def log(ctx: Context[Any, Any], sandbox: str, process_id: str) -> str:
        """The output of a process that is kept, without the middle of a long one."""

        async def read() -> str:
            process = await (await server.opened(ctx, sandbox)).box.process(process_id)
            buffer = HeadTailBuffer(MAX_RESOURCE_BYTES)
            position = 0
            while True:
                found = await process.read(position)
                if not found.chunks and not found.gap:
                    return buffer.collected().text
                position = found.after_seq
                for gap in found.gap:
                    buffer.skip(gap.length)
                for chunk in found.chunks:
                    buffer.append(chunk.data)

        return await _call(server, read())

    async def recording(ctx: Context[Any, Any], sandbox: str, terminal_id: str) -> str:
        """The recording of a terminal, for players of asciicast v2."""

        async def read() -> str:
            terminal = await (await server.opened(ctx, sandbox)).box.attach_terminal(terminal_id)
            try:
                text = await terminal.recording()
            finally:
                await terminal.release()
            if len(text) > MAX_RESOURCE_BYTES:
                raise ToolError(
                    f"the recording has more than {MAX_RESOURCE_BYTES} bytes: save it with `holdfast replay`"
                )
            return text

        return await _call(server, read())

    server.resource(_LOG, name="log", mime_type="text/plain")(log)
    server.resource(_RECORDING, name="recording", mime_type="application/x-asciicast")(recording)


async def _call(server: SandboxServer, work: Any) -> str:
    try:
        text: str = await server.call(work)
    except ToolError as error:
        raise ResourceError(str(error)) from error
    return text
