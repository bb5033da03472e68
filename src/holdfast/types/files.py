"""Files, directories and their changes; pure."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from holdfast.types.base import Struct

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "character", "block", "other"]
#: `written`: closed after writing. `overflow`: events are lost. `root_removed`: the watched directory is gone.
WatchKind = Literal["created", "modified", "written", "attributes", "removed", "moved", "overflow", "root_removed"]
#: A piece of a file in one message: large enough that a round trip counts little, and 8 of them fit in memory.
FILE_PIECE_BYTES: Final = 1024 * 1024
#: Entries of one page of a directory.
DIRECTORY_PAGE: Final = 5_000
#: Events of a watched directory in one reply.
WATCH_EVENTS: Final = 1_000


class FileInfo(Struct, frozen=True, kw_only=True):
    """The attributes of a file. `mode` has only the permission bits."""

    type: FileType
    size: int
    mode: int
    #: Modification time in nanoseconds since 1970, for which a float is not precise enough.
    mtime_ns: int
    uid: int
    gid: int
    #: The content of a symbolic link.
    target: str | None = None

    @property
    def mtime(self) -> float:
        """Modification time in seconds since 1970."""
        return self.mtime_ns / 1e9


class DirEntry(FileInfo, frozen=True, kw_only=True):
    """An entry of a directory; for a symbolic link, the link itself."""

    name: str


class DirPage(Struct, frozen=True):
    """Entries of a directory in the order of their names; `more` follow after the last of them."""

    entries: tuple[DirEntry, ...]
    more: bool


class WatchEvent(Struct, frozen=True, omit_defaults=True):
    """A change below a watched directory. Names are relative to it: `src/main.c`; the directory itself is empty."""

    seq: int
    kind: WatchKind
    name: str
    #: The earlier name of a file that was moved.
    old_name: str | None = None
    #: Whether the name is that of a directory.
    directory: bool = False
    #: Why events below `name` are lost.
    reason: str = ""


class WatchRead(Struct, frozen=True):
    """Events of a watched directory; after `ended` there are no more."""

    events: tuple[WatchEvent, ...]
    ended: bool = False


class FilePiece(Struct, frozen=True, kw_only=True):
    """A part of a file. `chunk` is the last field, as in `process/output`."""

    #: The size of the whole file now.
    size: int
    #: The file ends with this piece, now.
    eof: bool
    #: Identifies the file, in case another one gets its name meanwhile.
    file_id: str
    data: bytes = msgspec.field(name="chunk")


class FileAttributes(Struct, frozen=True, omit_defaults=True):
    """Attributes to set on a file; None leaves one as it is, or at the default of a new file."""

    mode: int | None = None
    mtime_ns: int | None = None
