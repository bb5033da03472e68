"""Records the ledger that `tests/unit/test_earlier_ledger.py` replays: `python record_ledger.py PACKAGE LEDGER`.

PACKAGE is a directory with the `holdfast` package whose server writes the ledger, for example `git archive` of an
earlier commit. The client is the installed package.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

import holdfast
from holdfast.types import TerminalSize
from tests.process.versions import home


async def record(package: Path, ledger: Path) -> None:
    """Run one process of each kind, a shell and a terminal; copy the ledger while they run."""
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/tmp") as directory, home(Path(directory)) as here:
        keeper, _ = here.serve(package)
        async with holdfast.connect(here.address) as box:
            done = await box.start(["sh", "-c", "echo out; echo err >&2; exit 3"], id="done", cwd="/")
            await done.wait()
            killed = await box.start(["sleep", "1000"], id="killed", cwd="/")
            await killed.terminate()
            runs = await box.start(
                ["sh", "-c", "while read line; do echo got $line; done"],
                id="runs",
                cwd="/",
                stdin="open",
                overflow="block",
            )
            await runs.write(b"x\n")
            await runs.wait_for_output("got x")
            pty = await box.start(["cat"], id="pty", cwd="/", tty=TerminalSize(10, 20))
            await pty.resize(12, 34)
            shell = await box.shell("sh", id="shell", cwd="/")
            await shell.run("cd /tmp; echo first")
            await shell.run("echo second >&2; false")
            terminal = await box.terminal("bash", id="terminal", cwd="/")
            await terminal.run("echo typed")
            (path,) = here.spool.glob("*/ledger")
            shutil.copyfile(path, ledger)
        here.stop(keeper)


if __name__ == "__main__":
    package, ledger = (Path(argument).resolve() for argument in sys.argv[1:])
    # The ledger holds the working directory of the server.
    os.chdir("/")
    os.environ["PWD"] = os.environ["OLDPWD"] = "/"
    asyncio.run(record(package, ledger))
