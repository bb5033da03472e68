"""The machine itself: a description of it, and the wait for a port that accepts connections."""

from __future__ import annotations

import asyncio
import builtins
import os
import platform
import pwd
import socket
from typing import Final

from holdfast import __version__
from holdfast.errors import InvalidParams, TimeoutError
from holdfast.launch import self_exec
from holdfast.runtime.process.environment import resolve_user
from holdfast.types import EnvironmentInfo, ShellInfo

#: Features of every server. `run_ids`: the event of a command has the id of the run that typed it.
FEATURES: Final = ("process", "tty", "exec_remote", "shell", "terminal", "run_ids")
#: Seconds between two attempts to connect to a port, which has no event for a new listener.
_PORT_RETRY: Final = (0.005, 0.25)


async def wait_for_port(port: int, host: str, timeout: float) -> None:
    """Wait until a port accepts connections; `TimeoutError` otherwise."""
    if not 0 < port < 65536:
        raise InvalidParams(f"port {port}: must be 1 to 65535")
    pause, longest = _PORT_RETRY
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except socket.gaierror as error:
                    raise InvalidParams(f"host {host!r}: {error.strerror}") from None
                except OSError:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
                else:
                    writer.close()
                    return
    except builtins.TimeoutError:
        raise TimeoutError(f"nothing listens on {host}:{port} after {timeout:g} s") from None


def environment_info(offered: tuple[str, ...] = ()) -> EnvironmentInfo:
    """The description of this machine; `offered` are the names of `confine.features` that are available."""
    account = resolve_user(str(os.geteuid()))
    shell = account.shell if os.access(account.shell, os.X_OK) else "/bin/sh"
    return EnvironmentInfo(
        shell=ShellInfo(os.path.basename(shell), shell),
        cwd=os.getcwd(),
        user=_user_name(),
        home=account.home,
        hostname=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        arch=platform.machine(),
        version=__version__,
        features=(*FEATURES, *offered),
        holdfast=tuple(self_exec.holdfast()),
    )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
