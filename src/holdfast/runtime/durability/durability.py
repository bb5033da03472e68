"""Durability of a server: the ledger, the link to the keeper, and the spool that outlive it.

The runtime records through this interface and never tests whether a job survives: `NullDurability` is for a server
without a keeper, and for a program that runs processes itself. Touches the ledger, the spool, the keeper's socket.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.keeper_link import KeeperLink, NullKeeperLink
from holdfast.runtime.durability.ledger import AnyLedger, NullLedger
from holdfast.runtime.durability.recorder import ProcessRecorder
from holdfast.runtime.durability.shell_recorder import ShellRecorder
from holdfast.runtime.durability.terminal_reads import ReadBuffer, read_terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.output.output_log import Spool
    from holdfast.types import ProcessSpec

#: Files of the spool that are not output.
LEDGER_NAME: Final = "ledger"
READS_NAME: Final = "terminal-reads"


class Durability:
    """Makes the recorders of processes and shells; one for a server."""

    def __init__(
        self, link: KeeperLink, ledger: AnyLedger, spool: Spool, config: ExecServerConfig, *, survives: bool = True
    ) -> None:
        self.link = link
        self.ledger = ledger
        self.spool = spool
        self.config = config
        #: Whether jobs survive the server: then their recorders make durable journals, logs and input queues.
        self.survives = survives
        self.keeper_pid = link.pid if survives else None
        self.reads = ReadBuffer(f"{spool.path}/{READS_NAME}") if survives else None
        #: The last key that was assigned.
        self.last_key = 0
        #: A message about the processes that ended with a killed keeper.
        self.lost = ""

    def new_key(self) -> int:
        """Assign a key to a job, which names its records and its files."""
        self.last_key += 1
        return self.last_key

    def begin(
        self, spec: ProcessSpec, mark: int, cwd: str, outputs: Mapping[int, int], stdin: int, *, internal: bool
    ) -> ProcessRecorder:
        """Record that a start is about to happen; from here on every server can find the process by its mark.

        Raises `ResourceExhausted` if the process might not survive the server.
        """
        self.ledger.require_room()
        # The streams, and the file that holds the input.
        self.link.require_room(len(outputs) + 2)
        recorded = msgspec.structs.replace(spec, env=None, env_policy=None, cwd=None)
        begun = r.ProcessBegun(self.new_key(), recorded, mark, os.fsencode(cwd), internal)
        recorder = ProcessRecorder(self, begun.key, spec, internal=internal)
        self.ledger.write(begun)
        self.link.keep(recorder.output_key, list(outputs.values()))
        if stdin >= 0 and not spec.tty:
            recorder.keep_input(stdin)
        return recorder

    def shell(self, key: int | None = None) -> ShellRecorder:
        """Return the recorder of a new shell, or of the shell that had this key."""
        return ShellRecorder(self, self.new_key() if key is None else key)

    def read_terminal(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        """Read a terminal; returns the bytes, empty at its end, and the number of this read.

        Raises `BlockingIOError` if the terminal has no output for now.
        """
        return (read_terminal(fd, limit), 0) if self.reads is None else self.reads.gather(fd, limit, key, offset)


class NullDurability(Durability):
    """Durability that records nothing: every process ends with this server."""

    def __init__(self, spool: Spool, config: ExecServerConfig) -> None:
        super().__init__(NullKeeperLink(), NullLedger(), spool, config, survives=False)

    def begin(
        self, spec: ProcessSpec, mark: int, cwd: str, outputs: Mapping[int, int], stdin: int, *, internal: bool
    ) -> ProcessRecorder:
        """Return a recorder; the recorded copy of the spec and the keeper's descriptors are not needed."""
        return ProcessRecorder(self, self.new_key(), spec, internal=internal)
