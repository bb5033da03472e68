"""A confined process executes only programs of its list: by name, through the loader, or from a file of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import InvalidParams
from holdfast.runtime.confine.features import detect_features
from holdfast.types import Confinement, ConfinementMode
from tests.support.servers import RunningServer, running_server

OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
MODES = [
    pytest.param(mode, marks=pytest.mark.skipif(bool(OFFERED[mode]), reason=f"no {mode} here: {OFFERED[mode]}"))
    for mode in get_args(ConfinementMode)
    if mode != "none"
]
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
LOADER = next((path for path in LOADERS if Path(path).exists()), "")
MISSING = OFFERED["bubblewrap"] or OFFERED["noexec"]
needs_jail = pytest.mark.skipif(bool(MISSING), reason=f"no jail: {MISSING}")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
async def box(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with holdfast.connect(server.address("unix")) as box:
        yield box


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy("/bin/uname", work / "own")
    return work


@pytest.fixture
def given(tmp_path: Path) -> Path:
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy("/bin/uname", given / "own")
    return given


@pytest.fixture
def open_work(work: Path) -> Path:
    """Another user may write it."""
    for path in (work, *work.parents[:3]):
        path.chmod(0o755)
    work.chmod(0o777)
    return work


async def printed(box: Sandbox, script: str, confinement: Confinement, user: str | None = None) -> str:
    process = await box.start(
        ["/bin/bash", "-c", script], cwd=confinement.writable[0], user=user, confinement=confinement
    )
    return (await process.communicate())[0].decode()


@pytest.mark.parametrize("mode", MODES)
async def test_only_programs_of_the_list_are_executed(box: Sandbox, work: Path, mode: ConfinementMode) -> None:
    free = Confinement(mode=mode, writable=(str(work),), network="none")
    assert await printed(box, "cat /dev/null && uname && /usr/bin/uname", free) == "Linux\nLinux\n"
    listed = replace(free, programs=("cat", "/usr/bin/wc"))
    script = "echo one | cat; echo two | /usr/bin/wc -l; uname; /usr/bin/uname; env uname; echo end"
    assert await printed(box, script, listed) == "one\n1\nend\n"
    wild = replace(free, programs=("c?t", "/usr/bin/unam*"))
    assert await printed(box, "echo one | cat; /usr/bin/uname; wc -l", wild) == "one\nLinux\n"


@needs_jail
@pytest.mark.skipif(not LOADER, reason="no loader of a known name")
async def test_nothing_is_executed_from_a_directory_that_was_given(box: Sandbox, work: Path, given: Path) -> None:
    free = Confinement(mode="bubblewrap", writable=(str(work),), readable=(str(given),), network="none")
    everywhere = (
        f"cat own >/tmp/own; cat own >/dev/shm/own; cat own >~/own;"
        f"for file in ./own {given}/own /tmp/own /dev/shm/own ~/own /usr/bin/uname; do {LOADER} $file; done; ./own"
    )
    # Without it, the loader of programs runs any file that can be read.
    loose = replace(free, programs=("cat",))
    assert (await printed(box, everywhere, loose)).count("Linux\n") >= 4
    closed = replace(loose, no_execution=True)
    assert await printed(box, everywhere, closed) == ""
    # Everything else is as it was: writing, and how much fits into scratch directories.
    assert await printed(box, "echo a >f; cat f; echo b >/tmp/g; cat /tmp/g", closed) == "a\nb\n"
    small = replace(closed, programs=("cat", "head"), scratch_bytes=1 << 20)
    script = "head -c 2000000 /dev/zero >/tmp/x || echo full; head -c 2000000 /dev/zero >/dev/shm/x || echo full"
    assert await printed(box, script, small) == "full\nfull\n"
    # A path of the list that leads into a directory opens that one alone.
    tools = replace(closed, programs=("cat", f"{given}/*"))
    assert await printed(box, f"{given}/own; ./own", tools) == "Linux\n"


@needs_jail
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_has_no_execution_either(box: Sandbox, open_work: Path) -> None:
    confinement = Confinement(
        mode="bubblewrap", writable=(str(open_work),), network="none", programs=("cat",), no_execution=True
    )
    script = "./own; cat own >/tmp/own && cat own >~/own && echo written; echo $UID"
    assert await printed(box, script, confinement, user="65534") == "written\n65534\n"


async def test_a_list_that_nothing_enforces_is_refused(box: Sandbox, work: Path) -> None:
    for confinement in (
        Confinement(mode="none", network="host", programs=("cat",)),
        Confinement(mode="landlock", writable=(str(work),), no_execution=True),
    ):
        with pytest.raises(InvalidParams, match="confinement"):
            await box.start(["/bin/true"], confinement=confinement)


def test_a_path_of_the_list_leads_into_a_directory() -> None:
    confinement = Confinement(programs=("git", "/srv/tools/*", "/opt/x/bin/y"))
    assert all(map(confinement.executes_in, ("/srv/tools", "/srv/tools/a", "/srv", "/opt/x")))
    assert not confinement.executes_in("/srv/to")
    assert not Confinement(programs=("*",)).executes_in("/srv")
