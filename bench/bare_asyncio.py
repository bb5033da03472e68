"""The memory baseline: so many processes with asyncio alone, and the size of the program before and after.

Run as `python -m bench.bare_asyncio COUNT`; it prints both. Nothing of ours is imported, so its size is asyncio's.
"""

from __future__ import annotations

import asyncio
import resource
import sys


def resident_bytes() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


async def main(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    alone = resident_bytes()
    processes = []
    try:
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                *("sleep", "600"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            processes.append(process)
        print(alone, resident_bytes())
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            await process.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
