"""One agent cannot take the spool from the others: neither by files, nor by inodes, nor by what it prints.

The server's spool is a small tmpfs of the test's own. All floods end by themselves, after a number of bytes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ResourceExhausted
from holdfast.runtime.confine.features import detect_features
from holdfast.runtime.shell.saved_state import MAX_SAVED_BYTES
from holdfast.types import CommandSpec, Confinement
from tests.support.file_systems import fill_blocks, small_file_system
from tests.support.servers import running_server

MIB = 1024 * 1024
SPOOL_BYTES = 24 * MIB
SPOOL_FILES = 400
#: More than the spool has of each.
FLOOD_BYTES = 32 * MIB
OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
MODES = [
    pytest.param(mode, marks=pytest.mark.skipif(bool(OFFERED[mode]), reason=f"no {mode} here: {OFFERED[mode]}"))
    for mode in ("bubblewrap", "landlock")
]
#: Attempts of a session on the directory of its shell's control files: `$d` is that directory.
FILL = f"""
d=${{_hold_%/keep}}
[ -d "$d" ] || exit 99
flood() {{ timeout 20 head -c {FLOOD_BYTES} /dev/zero; }}
for f in "$d"/new "$d"/pipes/new "$d"/command "$d"/keep "$d"/input "$d"/exports "$d"/state "$d"/pipes/saved; do
  flood >"$f" || :
  flood >>"$f" || :
done 2>/dev/null
i=0; while [ $i -lt {2 * SPOOL_FILES} ]; do : >"$d/i$i"; : >"$d/pipes/i$i"; i=$((i+1)); done 2>/dev/null
mkdir -p "$d/a/b" "$d/pipes/a" 2>/dev/null
ln -s x "$d/link" 2>/dev/null
mv "$d/keep" "$d/pipes/keep" 2>/dev/null
# Held open by a descriptor, and without a name.
{{ rm -f "$d/open"; flood >&8; }} 2>/dev/null 8<>"$d/open"
{{ rm -f "$d/keep"; flood >&8; }} 2>/dev/null 8>>"$d/keep"
echo tried
"""
#: Bytes that the other agent prints, and must get back.
PRINTED = 512 * 1024


@pytest.fixture
def spool() -> Iterator[str]:
    with small_file_system(f"size={SPOOL_BYTES},nr_inodes={SPOOL_FILES},mode=0711") as path:
        yield path


@pytest.fixture
async def box(spool: str) -> AsyncIterator[Sandbox]:
    with running_server(settings={"spool_directory": spool}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield box


def used(spool: str) -> tuple[int, int]:
    """Bytes and inodes."""
    found = os.statvfs(spool)
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree


def confinement(mode: str, work: Path) -> Confinement:
    work.mkdir(exist_ok=True)
    return Confinement(mode=mode, writable=(str(work),), network="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
async def test_a_session_cannot_fill_the_spool_of_the_others(
    box: Sandbox, spool: str, mode: str, tmp_path: Path
) -> None:
    async with (
        await box.shell("bash", confinement=confinement(mode, tmp_path / "one")) as one,
        await box.shell("bash", confinement=confinement(mode, tmp_path / "other")) as other,
    ):
        await other.run("true")
        before = used(spool)
        tried = await one.run(FILL, timeout=100)
        assert tried.stdout.endswith("tried\n"), tried
        bytes_after, files_after = used(spool)
        # Its own output, and what it saves for the next program, each within its bound.
        assert bytes_after - before[0] <= 2 * MAX_SAVED_BYTES
        assert files_after - before[1] <= 16
        printed = await other.run(f"head -c {PRINTED} /dev/zero | tr '\\0' x", timeout=100)
        assert (printed.exit_code, len(printed.stdout)) == (0, PRINTED)
        assert (await one.run("echo still")).stdout == "still\n"


@pytest.mark.parametrize("mode", MODES)
async def test_a_confined_shell_still_saves_what_the_next_program_needs(
    box: Sandbox, mode: str, tmp_path: Path
) -> None:
    async with await box.shell("bash", confinement=confinement(mode, tmp_path / "work")) as shell:
        await shell.run("word=kept; export SENT=on")
        ended = await shell.run("set -e; false")
        assert ended.restored == "state"
        assert (await shell.run('set +e; echo "$word $SENT"')).stdout == "kept on\n"
        ended = await shell.run("set -n; echo no")
        assert ended.restored == "exports"
        assert (await shell.run('echo "$word $SENT"')).stdout == " on\n"


async def test_more_than_a_shell_may_save_is_not_kept(box: Sandbox, spool: str) -> None:
    async with await box.shell("bash") as shell:
        await shell.run(f"big=$(head -c {MAX_SAVED_BYTES} /dev/zero | tr '\\0' x); export SENT=on")
        before, _ = used(spool)
        ended = await shell.run("set -e; false")
        # The shell could not be gone on with; nothing of what it saved stays.
        assert ended.state == "closed"
        assert used(spool)[0] - before <= MIB


async def test_what_one_session_prints_takes_nothing_of_what_another_printed(box: Sandbox) -> None:
    """Over the total, the largest log keeps less: a small one is below its share and stays whole."""
    async with await box.shell("bash") as other, await box.shell("bash") as one:
        stream = box.api.run_in_shell(other.id, CommandSpec("small", f"head -c {PRINTED} /dev/zero | tr '\\0' x"))
        async for _ in stream:
            pass
        for _ in range(3):
            assert (await one.run(f"head -c {FLOOD_BYTES} /dev/zero", timeout=100)).exit_code == 0
        kept = (await box.api.snapshot("small")).stdout
        assert len(kept) == PRINTED
        status = await box.status()
        assert status.spool_bytes <= status.spool_limit <= SPOOL_BYTES // 2


@pytest.mark.parametrize("what", ["bytes", "inodes"])
async def test_a_command_on_a_full_spool_is_refused_at_once_and_runs_when_there_is_room(
    box: Sandbox, spool: str, what: str
) -> None:
    async with await box.shell("bash") as shell:
        await shell.run("echo before")
        fill(spool, what)
        with pytest.raises(ResourceExhausted, match=rf"spool {spool}.*full: \d+ of \d+ {what} are free"):
            await shell.run("echo lost", timeout=100)
        for name in os.listdir(f"{spool}/filler"):
            os.unlink(f"{spool}/filler/{name}")
        assert (await shell.run("echo after", timeout=100)).stdout == "after\n"


def fill(spool: str, what: str) -> None:
    os.mkdir(f"{spool}/filler")
    if what == "bytes":
        fd = os.open(f"{spool}/filler/x", os.O_WRONLY | os.O_CREAT)
        fill_blocks(fd)
        os.close(fd)
    else:
        for number in range(os.statvfs(spool).f_ffree):
            os.close(os.open(f"{spool}/filler/{number}", os.O_CREAT))
