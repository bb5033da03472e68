"""A dev server in a sandbox, reachable from this machine, with a log of the files that change.

    python examples/dev_server.py local site
    python examples/dev_server.py docker:web site

The directory is uploaded and served by a program in the sandbox, whose port is forwarded to a port of this machine
until Ctrl-C. The sandbox needs no network and no published port.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

import holdfast

SERVER = ["python3", "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]


async def main(address: str, directory: str) -> None:
    async with holdfast.connect(address) as box:
        root = (await box.exec(["mktemp", "-d"], check=True)).stdout.strip()
        try:
            await box.upload(directory, root)
            # Bound to this client: if this program is killed, the server in the sandbox ends too.
            async with await box.start(SERVER, cwd=root, lifetime="connection") as server:
                ready = await server.wait_for_output(re.compile(rb"port (\d+)"), timeout=30)
                port = int(ready.groups[0] or 0)
                async with box.forward(port) as (host, local), box.watch(root, recursive=True) as events:
                    print(f"http://{host}:{local}/", flush=True)
                    async for event in events:
                        print(event.kind, event.name, flush=True)
        finally:
            await box.remove(root, recursive=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:3]))
