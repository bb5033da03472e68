"""pdb through a terminal: run a program to a line, print variables, continue to its end.

    python examples/debugger.py local

`expect` waits for the debugger's prompt, so no step depends on a pause.
"""

from __future__ import annotations

import asyncio
import sys

import holdfast

PROGRAM = """\
def mean(numbers):
    total = sum(numbers)
    return total / len(numbers)

print(mean([1, 2, 6]))
"""
PROMPT = "(Pdb) "


async def debug(box: holdfast.Sandbox, path: str) -> str:
    """The screen after a short session with pdb."""
    await box.write_file(path, PROGRAM)
    async with await box.terminal(["python3", "-m", "pdb", path], env={"PYTHON_COLORS": "0"}) as terminal:
        for line in ("break 3", "continue", "p total, numbers", "clear 1", "continue"):
            await terminal.expect(PROMPT, timeout=60)
            await terminal.send(line + "\n")
        await terminal.expect("3.0", timeout=60)
        return (await terminal.screen()).text


async def main(address: str) -> None:
    async with holdfast.connect(address) as box:
        print(await debug(box, "/tmp/holdfast-example-debugger.py"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    asyncio.run(main(sys.argv[1]))
