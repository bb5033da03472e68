"""A sandbox seen from the host: where the server is, and how to talk to it. A subclass for each kind.

`Place` is all that `connect` needs. `CommandPlace` is for the many kinds that have an exec command: given how to
run one command inside, it puts the server there and opens the channel. Another kind is written by giving `command`.
"""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from holdfast.errors import ConnectionLost, HoldfastError, SandboxError, SandboxGone
from holdfast.sandboxes.host_command import Outcome, run_outside
from holdfast.sandboxes.install.injection import MISSING, Injection
from holdfast.transport import stdio
from holdfast.transport.channel import Channel, Receiver
from holdfast.transport.stdio import without_queries

#: What a line of the engine's stderr means.
Signs = tuple[tuple[re.Pattern[str], str], ...]
#: Shells and engines say with these that the program to execute is not there.
NOT_FOUND_CODES: Final = (126, 127)


class Place(abc.ABC):
    """One sandbox. `connect` opens it, dials as often as it takes, and closes it."""

    #: How people name it.
    address: str
    #: How long the first answer may take: a channel may have to start the server.
    handshake_seconds: float = 30.0

    async def open(self) -> None:  # noqa: B027 - most kinds need nothing
        """Before the first channel: whatever must be there."""

    @abc.abstractmethod
    async def dial(self, receiver: Receiver) -> Channel:
        """A channel to the server inside. Called again when a channel broke."""

    def may_try_again(self) -> bool:
        """After a first channel that failed: whether the next will do something about it."""
        return False

    async def aclose(self) -> None:  # noqa: B027 - and leave nothing
        """After the last channel: take away what `open` has made."""


class CommandPlace(Place):
    """A sandbox in which a command of the host runs commands: `docker exec`, `kubectl exec`, `ssh`, a prefix."""

    #: The engine's words for a sandbox that is not there, or has ended: waiting would not bring it back.
    gone_signs: ClassVar[Signs] = ()

    def __init__(
        self, address: str, injection: Injection | None = None, *, channel: bool = True, poll_interval: float = 0.2
    ) -> None:
        self.address = address
        self.injection = injection or Injection()
        #: Whether a command can stay and talk. If not, each call is a command, and output is polled for.
        self.channel = channel
        self.poll_interval = poll_interval
        self._missing = False
        self._put_in = False

    @abc.abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """The command of the host that runs `argv` inside, with its own stdin, stdout and stderr."""

    async def copy_in(self, tree: Path, directory: str) -> bool:
        """Copy a tree into a directory inside, by the engine's own means; False if it has none."""
        return False

    def cannot_copy(self, why: str) -> SandboxError:
        """The error where neither unpacking nor `copy_in` is possible; `why` is about unpacking."""
        return SandboxError(f"{self.address}: the server cannot be brought in: {why}")

    async def run(self, argv: Sequence[str], *, stdin: Path | bytes = b"", seconds: float | None = None) -> Outcome:
        """Run one plain command inside, to its end. `SandboxGone` if there is no inside."""
        outcome = await run_outside(self.command(argv), stdin=stdin, seconds=seconds, env=environment())
        if outcome.exit_code != 0 and (gone := self.explain(outcome.words)) is not None:
            raise gone
        return outcome

    def explain(self, text: str) -> SandboxGone | None:
        """Whether these last words of the engine say that the sandbox is gone."""
        for sign, meaning in self.gone_signs:
            if sign.search(text):
                last = _last_line(without_queries(text))
                return SandboxGone(f"{self.address}: {meaning}: {last}", final=True)
        return None

    def lacks_program(self, exit_code: int, words: str) -> bool:
        """Whether the engine could not execute the command because its program is not inside."""
        return exit_code in NOT_FOUND_CODES

    # --- the channel -----------------------------------------------------------------------------------------

    async def dial(self, receiver: Receiver) -> Channel:
        if self._missing:
            await self.injection.put_in(self)
            self._missing, self._put_in = False, True
        argv = self.command(await self.injection.connect_command(self))
        env = environment()
        return await stdio.dial(argv, receiver, env=env, lend=True, name=self.address, explain=self.channel_ended)

    def may_try_again(self) -> bool:
        return self._missing and not self._put_in

    def channel_ended(self, error: ConnectionLost) -> HoldfastError:
        """What the end of a channel means, in our words."""
        words, code = str(error.details.get("words", "")), int(error.details.get("exit_code", 0))
        if (gone := self.explain(words)) is not None:
            return gone
        if code == MISSING or (self.lacks_program(code, words) and not self._put_in):
            # No server inside, or not even a shell to look for one: the next channel puts it there.
            self._missing = True
        return error


def environment() -> dict[str, str]:
    """Of the commands that we run. Some hand it on, and our own variables are about servers on this side."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word of why"])[-1]
