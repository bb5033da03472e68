"""Whether a sandbox reaches the network: a connection to the API server, which every pod has the address of."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.client.sandbox import Sandbox
from holdfast.errors import SandboxError
from holdfast.launch import self_exec

#: Some network plugins apply a policy a moment after a pod started: a pod that is open for longer is open.
ATTEMPTS: Final = 5
PAUSE_SECONDS: Final = 1.0

#: Prints `open` or `closed`. The kubelet gives the address to every container.
_CONNECT: Final = """
import os, socket
try:
    host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    socket.create_connection((host, int(port)), 1.5)
    print("open")
except OSError:
    print("closed")
"""


#: Prints the directory of the server's files, which its program is in.
_FIND_TREE: Final = """
for p in /proc/[0-9]*; do
  e=$(readlink "$p/exe" 2>/dev/null)
  case $e in */libexec/holdfast) echo "${e%/libexec/holdfast}"; exit 0;; esac
done
exit 1
"""


async def reaches_the_network(box: Sandbox, tree: str = "") -> bool:
    """Connect from the sandbox, with the interpreter of the server in `tree`; without one, a shell searches it."""
    tree = tree or (await box.exec(["sh", "-c", _FIND_TREE], timeout=30)).stdout.strip()
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE_SECONDS)
        done = await box.exec([*self_exec.in_bundle(tree), "-c", _CONNECT], timeout=30)
        answer = done.stdout.strip()
        if answer not in ("open", "closed"):
            raise SandboxError(f"network: cannot be checked: {done.stderr.strip()[-500:] or answer}")
        if answer == "closed":
            return False
    return True
