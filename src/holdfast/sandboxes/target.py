"""A sandbox as the host reaches it: its address, and how to open a channel. A subclass for each kind.

`SandboxTarget` is all that `connect` needs. `CommandTarget` is for the many kinds with an exec command: a subclass
gives `command`, which runs one command inside; installing the server and opening the channel are made of it.
`CommandSandbox` has such a command as a prefix.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from holdfast.errors import ConnectionLost, HandshakeFailed, HoldfastError, InvalidParams, SandboxError, SandboxGone
from holdfast.sandboxes.host_command import Outcome, run_host_command
from holdfast.sandboxes.install.installation import (
    FOUND,
    INSTALL_SECONDS,
    MISSING,
    RETRY_SECONDS,
    TREE_REQUEST,
    BundleChoice,
    Installation,
)
from holdfast.transport import stdio
from holdfast.transport.channel import Channel, Receiver
from holdfast.transport.preamble import Reply, without_queries

log = logging.getLogger(__name__)

#: Patterns of an engine's error output, each with its meaning.
Signs = tuple[tuple[re.Pattern[str], str], ...]
#: Exit codes of shells and engines for a program that does not exist inside.
NOT_FOUND_CODES: Final = (126, 127)


class SandboxTarget(abc.ABC):
    """One sandbox. `connect` opens it, dials once for each channel, and closes it."""

    #: The name of the sandbox in texts.
    address: str
    #: Seconds until the server must have answered: a channel may have to start it.
    handshake_seconds: float = 30.0

    @classmethod
    def from_address(cls, scheme: str, rest: str, **options: Any) -> Self:
        """Make the target of the address `scheme:rest`."""
        return cls(rest, **options)  # type: ignore[call-arg] # the constructors of the kinds differ

    async def open(self) -> None:  # noqa: B027 - most kinds need nothing
        """Prepare for the first channel."""

    @abc.abstractmethod
    async def dial(self, receiver: Receiver) -> Channel:
        """Open a channel to the server inside. Called again after a channel broke."""

    async def aclose(self) -> None:  # noqa: B027 - most kinds need nothing
        """Remove what `open` made, after the last channel."""


class CommandTarget(SandboxTarget):
    """A sandbox in which a command of the host runs commands: `docker exec`, `kubectl exec`, `ssh`, a prefix."""

    #: The engine's errors for a sandbox that does not exist or has ended: dialling again cannot succeed.
    gone_signs: ClassVar[Signs] = ()

    def __init__(
        self, address: str, install: Installation | None = None, *, channel: bool = True, poll_interval: float = 0.2
    ) -> None:
        self.address = address
        self.installation = install or Installation()
        #: Whether a command may run as long as the connection. If not, each call is a command and output is polled.
        self.channel = channel
        self.poll_interval = poll_interval

    @property
    def is_near(self) -> bool:
        """Whether the sandbox is on this machine, so that its server is sent without compression."""
        return False

    @property
    def installs_in_channel(self) -> bool:
        """Whether the boot command may install a missing server itself, so that one command is enough."""
        return True

    @abc.abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command of the host that runs `argv` inside, with its own stdin, stdout and stderr."""

    async def copy_in(self, tree: Path, directory: str) -> bool:
        """Copy a tree into a directory inside, by the engine's own copy; False if the engine has none."""
        return False

    def cannot_copy(self, why: str) -> SandboxError:
        """Return the error for a sandbox that allows neither unpacking nor `copy_in`; `why` is about unpacking."""
        return SandboxError(f"{self.address}: the server cannot be installed: {why}")

    async def run(self, argv: Sequence[str], *, stdin: Path | bytes = b"", seconds: float | None = None) -> Outcome:
        """Run one command inside to its end. `SandboxGone` if the sandbox does not exist."""
        outcome = await run_host_command(self.command(argv), stdin=stdin, seconds=seconds, env=environment())
        if outcome.exit_code != 0 and (gone := self.explain(outcome.error)) is not None:
            raise gone
        return outcome

    def explain(self, text: str) -> SandboxGone | None:
        """Return `SandboxGone` if the engine's error output is one of `gone_signs`."""
        for sign, meaning in self.gone_signs:
            if sign.search(text):
                last = (without_queries(text).strip().splitlines() or ["no reason given"])[-1]
                return SandboxGone(f"{self.address}: {meaning}: {last}", final=True)
        return None

    def lacks_program(self, exit_code: int, text: str) -> bool:
        """Whether the engine could not execute the command because its program does not exist inside."""
        return exit_code in NOT_FOUND_CODES

    # --- the channel -----------------------------------------------------------------------------------------

    async def dial(self, receiver: Receiver) -> Channel:
        """Run the boot command, which becomes the channel; if no server is installed then, install it and repeat.

        The boot command leaves a whole server inside or none; one that was cut off before its report is run again.
        """
        for wait in (*RETRY_SECONDS, None):
            try:
                return await self._run_boot(receiver, requests=self.installs_in_channel)
            except ConnectionLost as ended:
                code, text = int(ended.details.get("exit_code", 0)), str(ended.details.get("words", ""))
                if code == MISSING or self.lacks_program(code, text):
                    break
                if wait is None or not self.installation.has_shell:
                    raise
                log.info("%s: the boot command was cut off and is run again: %s", self.address, ended)
            await asyncio.sleep(wait)
        await self.installation.install(self, text)
        return await self._run_boot(receiver)

    async def _run_boot(self, receiver: Receiver, *, requests: bool = False) -> Channel:
        argv = await self.installation.command(self, "connect", requests=requests)
        # Executed without a shell, the server prints no report: its reply to the handshake shows that it is there.
        report = FOUND if self.installation.has_shell else None
        seconds = self.handshake_seconds
        try:
            async with asyncio.timeout(seconds) as limit:

                async def reply(request: bytes) -> AsyncIterator[bytes]:
                    nonlocal seconds
                    seconds = INSTALL_SECONDS
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    async for piece in self.installation.reply(self, request):
                        yield piece

                return await self.start_channel(argv, receiver, report, reply if requests else None)
        except TimeoutError:
            raise HandshakeFailed(f"{self.address}: no answer in {seconds:g} s") from None

    async def start_channel(
        self,
        argv: Sequence[str],
        receiver: Receiver,
        report: bytes | None,
        reply: Reply | None = None,
    ) -> Channel:
        """Run a command inside with its stdin and stdout as a channel, once it printed `report` if that is set.

        `reply` gives the input for a `TREE_REQUEST` before that.
        """
        return await stdio.dial(
            self.command(argv),
            receiver,
            env=environment(),
            lend=True,
            name=self.address,
            explain=self.channel_ended,
            report=report,
            request=TREE_REQUEST,
            reply=reply,
        )

    def channel_ended(self, error: ConnectionLost) -> HoldfastError:
        """Return the error for the end of a channel: `SandboxGone` if the engine reported that."""
        return self.explain(str(error.details.get("words", ""))) or error


class CommandSandbox(CommandTarget):
    """A sandbox reached by `PREFIX... COMMAND...`: `["nerdctl", "exec", "-i", "web"]`, `["chroot", "/jail"]` ...

    The prefix must hand on stdin, stdout and stderr as they are. `name` is the sandbox's name in errors. If the
    prefix hands input on only when it is complete, or ends commands after a while, pass `channel=False`: each call
    is then a command of its own, and output is polled every `poll_interval` seconds.
    """

    def __init__(
        self,
        prefix: Sequence[str],
        *,
        name: str | None = None,
        directory: str | None = None,
        bundle: BundleChoice = True,
        channel: bool = True,
        poll_interval: float = 0.2,
    ) -> None:
        if isinstance(prefix, str) or not prefix:
            raise InvalidParams(f"prefix {prefix!r}: a list, the program and its arguments")
        installation = Installation(directory=directory, bundle=bundle)
        super().__init__(name or shlex.join(prefix), installation, channel=channel, poll_interval=poll_interval)
        self.prefix = tuple(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self.prefix, *argv]


def environment() -> dict[str, str]:
    """Return our environment for exec commands, which may hand it on, without variables of servers on this side."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
