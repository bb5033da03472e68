"""Output that leaves as ranges of the spool's file: from memory by reference, from a disk as copies."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.runtime.local import LocalExec
from holdfast.server.outbox import Outbox
from holdfast.transport.channel import SpoolFrame
from holdfast.transport.stream import from_socket
from holdfast.types import ProcessSpec
from holdfast.wire.codec import Codec
from holdfast.wire.framing import FrameReader, Oversized
from holdfast.wire.messages import PROCESS_CLOSED, PROCESS_OUTPUT, OutputParams

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
MIB = 1024 * 1024
LINES = 2 * MIB
#: Prints 16 MiB: every line is its number, so a byte at a wrong offset shows.
PRINT = f"import sys; [sys.stdout.write('%07d\\n' % n) for n in range({LINES})]"


class Deaf:
    """A receiver that ignores all messages."""

    def message_received(self, message: bytes | Oversized) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


@pytest.fixture(params=["memory", "disk"])
def spool_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    parent = "/dev/shm" if request.param == "memory" else tmp_path
    with tempfile.TemporaryDirectory(prefix="hf-", dir=parent) as path:
        yield path


async def start_printing(box: LocalExec) -> None:
    await box.start(ProcessSpec("p", (sys.executable, "-S", "-c", PRINT), overflow="drop"))


async def test_a_large_frame_is_a_range_of_the_file_on_every_spool(
    make_exec: MakeExec, spool_directory: str
) -> None:
    """On a disk too: to encode the bytes would copy them three times, into new memory."""
    box = make_exec(spool_directory=spool_directory)
    await start_printing(box)
    await box.wait("p")
    one, two = socket.socketpair()
    channel = from_socket(one, Deaf(), description="one")
    channel.use_lengths()
    outbox = Outbox(channel, Codec("msgpack"))
    process = box.processes.process("p")
    outbox.subscribe(process, name="reader")
    frame = outbox.next_frame()
    assert isinstance(frame, SpoolFrame)
    assert frame.lends_pages == process.logs[0].lends_pages
    assert os.pread(frame.fd, 16, frame.offset) == b"0000000\n0000001\n"
    outbox.close()
    channel.close()
    two.close()


async def test_a_connection_that_stalls_in_a_frame_gets_its_bytes_after_the_log_has_freed_them(
    make_exec: MakeExec, spool_directory: str
) -> None:
    box = make_exec(spool_directory=spool_directory, retained_output_bytes_per_process=2 * MIB)
    one, two = socket.socketpair()
    two.setblocking(False)
    channel = from_socket(one, Deaf(), description="one")
    channel.use_lengths()
    codec = Codec("msgpack")
    outbox = Outbox(channel, codec)
    channel.set_source(outbox)
    await start_printing(box)
    outbox.subscribe(box.processes.process("p"), name="reader")
    async with asyncio.timeout(SAFETY_NET):
        await box.wait("p")

        received, frames, end, lost = 0, FrameReader(4 * MIB), 0, 0
        frames.use_lengths()
        loop = asyncio.get_running_loop()
        closed = False
        while not closed:
            for message in frames.feed(await loop.sock_recv(two, MIB)):
                assert not isinstance(message, Oversized)
                envelope = codec.decode(message)
                closed = envelope.method == PROCESS_CLOSED.name
                if envelope.method == PROCESS_OUTPUT.name:
                    output = codec.decode_body(envelope.params, OutputParams, "output")
                    assert output.chunk == printed(output.offset, len(output.chunk))
                    received += len(output.chunk)
                    lost += output.offset - end
                    end = output.offset + len(output.chunk)
    assert (received + lost, end) == (LINES * 8, LINES * 8)
    assert lost > 0
    channel.close()
    two.close()


def printed(offset: int, length: int) -> bytes:
    first, last = offset // 8, (offset + length) // 8
    return b"".join(b"%07d\n" % number for number in range(first, last + 1))[offset - first * 8 :][:length]
