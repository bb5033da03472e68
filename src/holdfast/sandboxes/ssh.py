"""Hosts over the OpenSSH client, with the user's own settings, keys and known hosts.

One connection carries all commands (ControlMaster), so that the second costs no handshake. Its control socket is in
a private directory, which `aclose` removes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from typing import ClassVar, Final
from urllib.parse import urlsplit

from holdfast.errors import InvalidParams
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.install.installation import BundleChoice, Installation
from holdfast.sandboxes.target import CommandTarget, Signs

#: ssh closes the connection after two missing answers at this interval; the client then dials again.
ALIVE_SECONDS: Final = 15
#: The limit for a host to accept the connection.
CONNECT_SECONDS: Final = 20


class SshHost(CommandTarget):
    """`ssh:USER@HOST`, `ssh:HOST`, or `ssh://USER@HOST:PORT`; HOST may be a name of the ssh configuration."""

    gone_signs: ClassVar[Signs] = (
        (re.compile(r"Permission denied|Host key verification failed|Too many authentication"), "refused"),
        (re.compile(r"Could not resolve hostname"), "there is no such host"),
    )

    def __init__(
        self,
        destination: str,
        *,
        port: int | None = None,
        options: Sequence[str] = (),
        directory: str | None = None,
        bundle: BundleChoice = True,
    ) -> None:
        address = f"ssh:{destination}"
        if destination.startswith("//"):
            parts = urlsplit(address)
            destination = f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname or ""
            port = parts.port if port is None else port
        # A destination that begins with a dash would be an option, and some options run commands here.
        if not destination or destination.startswith("-") or any(c.isspace() for c in destination):
            raise InvalidParams(f"{address}: USER@HOST, HOST, or //USER@HOST:PORT")
        super().__init__(address, Installation(directory=directory, bundle=bundle))
        self.destination = destination
        self.port = port
        #: Further `-o` options, each NAME=VALUE.
        self.options = tuple(options)
        self._control: str | None = None

    async def open(self) -> None:
        self._control = tempfile.mkdtemp(prefix="hf-ssh-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)

    def command(self, argv: Sequence[str]) -> list[str]:
        # sshd gives the line to the user's shell: quote each word for it.
        return [*self._ssh(), "-T", "--", self.destination, shlex.join(argv)]

    def _ssh(self) -> list[str]:
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT_SECONDS}",
            f"ServerAliveInterval={ALIVE_SECONDS}",
            "ServerAliveCountMax=2",
            *self.options,
        ]
        if self._control is not None:
            options += ["ControlMaster=auto", f"ControlPath={self._control}/%C", "ControlPersist=60"]
        port = [] if self.port is None else ["-p", str(self.port)]
        return ["ssh", *port, *(word for option in options for word in ("-o", option))]

    async def aclose(self) -> None:
        if self._control is not None:
            await run_host_command([*self._ssh(), "-O", "exit", "--", self.destination])
            shutil.rmtree(self._control, ignore_errors=True)
            self._control = None
