"""Durability of a server: the ledger, the link to the keeper, and the spool that outlive it.

The runtime records through this interface and never tests whether anything survives: `NullDurability` is for a
server without a keeper, and for a program that runs processes itself. Touches the ledger, the spool and the
keeper's socket.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.input_log import DurableInput
from holdfast.runtime.durability.keeper_link import KeeperLink, NullKeeperLink
from holdfast.runtime.durability.ledger import Ledger, NullLedger, RecordWriter
from holdfast.runtime.durability.recorder import DurableJournal, DurableOutputLog, JobRecorder, ProcessRecorder
from holdfast.runtime.durability.shell_recorder import ControlLines, ShellRecorder
from holdfast.runtime.durability.terminal_reads import ReadBuffer, read_terminal
from holdfast.runtime.output.journal import Journal
from holdfast.runtime.output.output_log import OutputLog, Spool
from holdfast.runtime.process.input import InputQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.config import ExecServerConfig
    from holdfast.types import ProcessSpec

#: Files of the spool that are not output.
LEDGER_NAME: Final = "ledger"
READS_NAME: Final = "terminal-reads"


class Durability(ABC):
    """The interface of the runtime to whatever survives the server; one for a server."""

    def __init__(
        self, link: KeeperLink, ledger: RecordWriter, spool: Spool, config: ExecServerConfig, keeper_pid: int | None
    ) -> None:
        self.link = link
        self.ledger = ledger
        self.spool = spool
        self.config = config
        self.keeper_pid = keeper_pid
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
        recorder = ProcessRecorder(self, begun)
        self.ledger.write(begun)
        self.link.keep(recorder.output_key, list(outputs.values()))
        if stdin >= 0 and not spec.tty:
            recorder.keep_input(stdin)
        return recorder

    def shell(self, key: int | None = None) -> ShellRecorder:
        """The recorder of a new shell, or of the shell that had this key."""
        return ShellRecorder(self, self.new_key() if key is None else key)

    @abstractmethod
    def new_journal(self, recorder: JobRecorder) -> Journal: ...

    @abstractmethod
    def new_log(self, recorder: JobRecorder, kind: int, retained_bytes: int) -> OutputLog: ...

    @abstractmethod
    def new_input(
        self, recorder: JobRecorder, fd: int, *, name: str, owns_fd: bool, awaits_reader: bool
    ) -> InputQueue: ...

    @abstractmethod
    def new_control_lines(self) -> ControlLines | None:
        """The file from which control lines are sent to a shell; None if they are sent from memory."""

    @abstractmethod
    def read_terminal(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        """Read a terminal; returns the bytes, empty at its end, and the number of this read.

        Raises `BlockingIOError` if the terminal has no output for now.
        """


class NullDurability(Durability):
    """Durability that records nothing: every process ends with this server."""

    def __init__(self, spool: Spool, config: ExecServerConfig) -> None:
        super().__init__(NullKeeperLink(), NullLedger(), spool, config, None)

    def new_journal(self, recorder: JobRecorder) -> Journal:
        return Journal(self.config.retained_chunks_per_process)

    def new_log(self, recorder: JobRecorder, kind: int, retained_bytes: int) -> OutputLog:
        return OutputLog(self.spool, retained_bytes)

    def new_input(
        self, recorder: JobRecorder, fd: int, *, name: str, owns_fd: bool, awaits_reader: bool
    ) -> InputQueue:
        limit = self.config.stdin_buffer_bytes
        return InputQueue(fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader)

    def new_control_lines(self) -> ControlLines | None:
        return None

    def read_terminal(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        return read_terminal(fd, limit), 1


class KeeperDurability(Durability):
    """Durability under a keeper: a ledger, named files, and descriptors that the keeper holds too."""

    def __init__(self, link: KeeperLink, ledger: Ledger, spool: Spool, config: ExecServerConfig) -> None:
        super().__init__(link, ledger, spool, config, link.pid)
        self.reads = ReadBuffer(f"{spool.path}/{READS_NAME}")

    def new_journal(self, recorder: JobRecorder) -> Journal:
        return DurableJournal(self.config.retained_chunks_per_process, recorder)

    def new_log(self, recorder: JobRecorder, kind: int, retained_bytes: int) -> OutputLog:
        return DurableOutputLog(self.spool, retained_bytes, recorder, kind)

    def new_input(
        self, recorder: JobRecorder, fd: int, *, name: str, owns_fd: bool, awaits_reader: bool
    ) -> InputQueue:
        limit = self.config.stdin_buffer_bytes
        return DurableInput(
            fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader, recorder=recorder
        )

    def new_control_lines(self) -> ControlLines | None:
        return ControlLines()

    def read_terminal(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        return self.reads.gather(fd, limit, key, offset)
