"""The short part of the fault harness: fixed seeds. `make faults` runs it for minutes, with new ones."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from tests.support.servers import running_server, server_environment

from . import hang_report
from .checking import Broken, Following, compare, same
from .harness import REPOSITORY, Round
from .job_context import connected

JOBS = 16


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        (11, ("crash",)),
        (369, ("kill", "stall")),
        (269, ("kill", "stop", "cut", "delay")),
        (326, ("enospc", "emfile")),
    ],
)
async def test_nothing_is_lost(seed: int, kinds: tuple[str, ...]) -> None:
    result = await Round(seed, kinds, JOBS).run()
    assert result.failures == (), "\n".join(f"{each.job}: {each.what}\n{each.log}" for each in result.failures)
    assert sum(result.jobs.values()) == JOBS
    # Jobs for which there is no room are refused, and print nothing: how many, the moment decides.
    assert result.bytes_checked > (1_000 if "enospc" in kinds else 100_000)
    assert result.restarts >= ("kill" in kinds or "crash" in kinds)


async def test_a_hang_is_reported_with_the_tasks_of_both_sides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(hang_report.SERVER_SCRIPT)
    paths = (str(tmp_path), server_environment()["PYTHONPATH"], REPOSITORY)
    with running_server(environ={"PYTHONPATH": os.pathsep.join(paths)}) as server:
        async with connected(server.address("unix")) as box:
            await box.start(["sleep", "1000"], id="sleeper")
            waiting = asyncio.create_task((await box.process("sleeper")).wait(), name="the job")
            found = await hang_report.report(server, box)
            waiting.cancel()
            await asyncio.wait((waiting,))
            await (await box.process("sleeper")).terminate(force=True)
        assert re.search(r"the job\n.*Process\.wait", found), found
        assert re.search(r"sleep 1000 \n.*\n.*nanosleep", found), found
        assert "process_id='sleeper'" in found
        assert "ServerConnection at " in server.log()
        assert re.search(r"tasks of the server\n.*\n.* _serve ", server.log()), server.log()


def test_a_difference_is_told_with_its_offset() -> None:
    expected = b"0123456789" * 10
    same("all", expected, expected)
    compare("a part", b"345", expected, 3)
    with pytest.raises(Broken, match="first differing byte is at offset 17: b'x' instead of b'7'"):
        compare("a part", b"56x", expected, 15)
    with pytest.raises(Broken, match="2 bytes too many after its end at 100"):
        compare("its end", b"9xx", expected, 99)
    with pytest.raises(Broken, match="ends at byte 50 of 100"):
        same("all", expected[:50], expected)


def test_what_a_reader_is_told_twice_or_never_is_noticed() -> None:
    from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap

    def reported(*events: OutputChunk | OutputGap | Exited | Closed) -> Following:
        following = Following("job", {"stdout": b"abcdef"}, ExitStatus(3))
        for event in events:
            following.take(event)
        following.over()
        return following

    first, rest = OutputChunk("stdout", 0, b"abc", 1), OutputChunk("stdout", 3, b"def", 2)
    end = Exited(3, ExitStatus(3)), Closed(4)
    assert reported(first, rest, *end).seen == 6
    gap = reported(first, OutputGap("stdout", 3, 3), *end)
    assert (gap.seen, gap.lost) == (3, 3)
    for wrong, match in (
        ((first, first, rest, *end), "number 1 comes after number 1"),
        ((first, OutputChunk("stdout", 2, b"cdef", 2), *end), "there twice"),
        ((first, OutputChunk("stdout", 4, b"ef", 2), *end), "missing"),
        ((first, *end), "ends at byte 3 of 6"),
        ((first, rest, Exited(3, ExitStatus(0)), Closed(4)), "ended with"),
        ((first, rest, end[0]), "once each"),
    ):
        with pytest.raises(Broken, match=match):
            reported(*wrong)
