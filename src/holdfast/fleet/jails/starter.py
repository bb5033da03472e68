"""The maker's side of a zygote: starts it when the first jail is made, and sends it what to start."""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import threading
from typing import Any, Final

from holdfast.errors import SandboxError
from holdfast.fleet.jails import launch as jail_launch
from holdfast.launch import self_exec
from holdfast.sandboxes.install.bundle import Bundle, cache_directory, make_bundle

#: Forks, so that the zygote is not a child that its maker has to reap; enters the namespace in which the bundle is
#: where it is in jails; becomes the zygote.
_BOOT: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
import launch as jail_launch
tree, privileged, *command = sys.argv[2:]
if os.fork():
    os._exit(0)
os.setsid()
try:
    jail_launch.enter_zygote_namespace(tree, privileged=privileged == "yes")
except OSError as error:
    sys.exit(f"jail: {error.strerror or error}")
os.execve(command[0], command, {})
"""


class Zygote:
    """One zygote, for all threads and event loops of this process."""

    def __init__(self, tree: str) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def start(self, spec: dict[str, Any], descriptors: list[int]) -> None:
        """Start a jail. It reports readiness, or why there is none, through `descriptors`."""
        with self._lock:
            try:
                self._send(spec, descriptors)
            except OSError:  # the zygote was killed
                self.close()
                self._send(spec, descriptors)

    def _send(self, spec: dict[str, Any], descriptors: list[int]) -> None:
        if self._socket is None:
            self._socket = self._boot()
        body = json.dumps(spec).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([jail_launch.REQUEST_HEAD.pack(len(body))], [rights])
        self._socket.sendall(body)

    def _boot(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            privileged = "yes" if os.geteuid() == 0 else "no"
            command = [
                *self_exec.in_bundle(jail_launch.SERVER),
                *("-m", "holdfast.fleet.jails.zygote", str(theirs.fileno()), privileged),
            ]
            directory = os.path.dirname(os.path.abspath(jail_launch.__file__))
            try:
                subprocess.run(
                    [*self_exec.command(), "-I", "-S", "-c", _BOOT, directory, self._tree, privileged, *command],
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"bwrap: {error.strerror}") from None
        return ours

    def close(self) -> None:
        """End the zygote; jails go on, and the next one starts another."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


@functools.cache
def zygote(tree: str) -> Zygote:
    """The zygote of this process for one bundle; it ends with this process."""
    made = Zygote(tree)
    atexit.register(made.close)
    return made


def server_bundle() -> Bundle:
    """The bundle that jails of this process run; its inputs are compared with the cache once, not for each jail."""
    directory = cache_directory()
    chosen = _bundle(directory)
    if not os.path.exists(chosen.path):  # the cache was emptied
        _bundle.cache_clear()
        chosen = _bundle(directory)
    return chosen


@functools.cache
def _bundle(directory: str) -> Bundle:
    """The bundle in one cache directory."""
    return make_bundle()
