"""The parameters and results of `file/*` and `fs/*`; pure.

`fs/*` are the methods that the Codex CLI calls on its exec-server, with its field names. Paths are encoded as
`wire.paths` defines.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    WATCH_EVENTS,
    DirPage,
    FileInfo,
    FilePiece,
    Struct,
    WatchRead,
)
from holdfast.wire.messages import Empty
from holdfast.wire.methods import WireMethod


class FileReadParams(Struct, frozen=True, omit_defaults=True):
    path: str
    offset: int = 0
    #: Maximum number of bytes; the server may return fewer.
    size: int = FILE_PIECE_BYTES
    user: str | None = None


class FileWriteParams(Struct, frozen=True, omit_defaults=True):
    """A whole file, or, with `upload_id`, a piece of a file that appears under its name at `file/commit`."""

    path: str
    chunk: bytes
    upload_id: str | None = None
    offset: int = 0
    mode: int | None = None
    mtime_ns: int | None = None
    make_parents: bool = True
    user: str | None = None


class FileWriteResult(Struct, frozen=True):
    """The number of bytes that were written."""

    written: int


class FileCommitParams(Struct, frozen=True, omit_defaults=True):
    path: str
    upload_id: str
    #: Size of the whole file in bytes.
    size: int
    mode: int | None = None
    mtime_ns: int | None = None
    user: str | None = None


class FileAbandonParams(Struct, frozen=True, omit_defaults=True):
    path: str
    upload_id: str
    user: str | None = None


class FileStatParams(Struct, frozen=True, omit_defaults=True):
    path: str
    follow: bool = True
    user: str | None = None


class FileListParams(Struct, frozen=True, omit_defaults=True):
    path: str
    #: The last name of the previous page.
    after: str = ""
    limit: int = DIRECTORY_PAGE
    user: str | None = None


class FileMakeDirParams(Struct, frozen=True, omit_defaults=True):
    path: str
    parents: bool = True
    exist_ok: bool = True
    mode: int | None = None
    user: str | None = None
    #: Idempotency key: a repeated request takes effect once.
    request_id: str | None = None
    #: The uid and gid of a new directory.
    owner: int | None = None


class FileRemoveParams(Struct, frozen=True, omit_defaults=True):
    path: str
    recursive: bool = False
    missing_ok: bool = False
    user: str | None = None
    request_id: str | None = None


class FileMoveParams(Struct, frozen=True, omit_defaults=True):
    source: str
    target: str
    user: str | None = None
    request_id: str | None = None


class FileCopyParams(Struct, frozen=True, omit_defaults=True):
    source: str
    target: str
    recursive: bool = False
    user: str | None = None
    request_id: str | None = None


class FileMakeLinkParams(Struct, frozen=True, omit_defaults=True):
    path: str
    #: The content of the link.
    target: str
    user: str | None = None


class FileSetAttributesParams(Struct, frozen=True, omit_defaults=True):
    path: str
    mode: int | None = None
    mtime_ns: int | None = None
    user: str | None = None


class FileRealPathParams(Struct, frozen=True, omit_defaults=True):
    path: str
    user: str | None = None
    strict: bool = True


class FileRealPathResult(Struct, frozen=True):
    path: str


class FileWatchParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Watch a directory. The caller chooses `watch_id`."""

    path: str
    watch_id: str
    recursive: bool = False
    user: str | None = None


class FileReadWatchParams(Struct, frozen=True, omit_defaults=True):
    watch_id: str
    #: The number of the last event that the caller has; the server drops it and all before.
    after: int = 0
    limit: int = WATCH_EVENTS
    wait_ms: int = 0


class FileUnwatchParams(Struct, frozen=True):
    watch_id: str


# --- as the Codex CLI defines them ------------------------------------------------------------------------------


class FsPathParams(Struct, frozen=True, forbid_unknown_fields=True):
    """A `file:` URI or a path. `sandbox` is a policy to enforce: see `server.fs`.

    As in every `fs/*` request, an unknown field is an error, because it may be a restriction.
    """

    path: str
    sandbox: Any = None
    follow_symlinks: bool | None = None


class FsReadFileResult(Struct, frozen=True):
    data: bytes = msgspec.field(name="dataBase64")


class FsWriteFileParams(FsPathParams, frozen=True, kw_only=True):
    data: bytes = msgspec.field(name="dataBase64")


class FsCreateDirectoryParams(FsPathParams, frozen=True):
    recursive: bool | None = None


class FsMetadata(Struct, frozen=True):
    is_directory: bool
    is_file: bool
    is_symlink: bool
    size: int
    created_at_ms: int
    modified_at_ms: int


class FsEntry(Struct, frozen=True):
    file_name: str
    is_directory: bool
    is_file: bool


class FsReadDirectoryResult(Struct, frozen=True):
    entries: tuple[FsEntry, ...]


class FsRemoveParams(FsPathParams, frozen=True):
    recursive: bool | None = None
    force: bool | None = None


class FsCopyParams(Struct, frozen=True, forbid_unknown_fields=True):
    source_path: str
    destination_path: str
    recursive: bool = False
    sandbox: Any = None


class FsOpenParams(Struct, frozen=True, forbid_unknown_fields=True):
    """The caller chooses `handle_id`. The mode `replace` makes or empties the file, for `fs/writeBlock`."""

    handle_id: str
    path: str
    sandbox: Any = None
    mode: Literal["read", "replace"] = "read"


class FsHandle(Struct, frozen=True):
    handle_id: str


class FsReadBlockParams(Struct, frozen=True, forbid_unknown_fields=True):
    handle_id: str
    offset: int
    len: int


class FsBlock(Struct, frozen=True):
    chunk: bytes
    eof: bool


class FsWriteBlockParams(Struct, frozen=True, forbid_unknown_fields=True):
    handle_id: str
    offset: int
    chunk: bytes


class FsWalkOptions(Struct, frozen=True, forbid_unknown_fields=True):
    #: 0: the entries of the directory itself.
    max_depth: int
    max_directories: int
    max_entries: int
    follow_directory_symlinks: bool = False


class FsWalkParams(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    options: FsWalkOptions
    sandbox: Any = None


class FsWalkEntry(Struct, frozen=True):
    path: str
    kind: Literal["directory", "file"]


class FsWalkError(Struct, frozen=True):
    path: str
    message: str


class FsWalkResult(Struct, frozen=True):
    entries: tuple[FsWalkEntry, ...]
    errors: tuple[FsWalkError, ...]
    #: A limit of the options was reached.
    truncated: bool


class FsWatchMissingParams(Struct, frozen=True):
    watch_id: int
    missing: tuple[str, ...]


class FsWatchMissingResult(Struct, frozen=True):
    watching: bool


# --- rows of the method table -----------------------------------------------------------------------------------

FILE_READ = WireMethod("file/read", FileReadParams, FilePiece)
FILE_WRITE = WireMethod("file/write", FileWriteParams, FileWriteResult)
FILE_COMMIT = WireMethod("file/commit", FileCommitParams, FileInfo)
FILE_ABANDON = WireMethod("file/abandon", FileAbandonParams, Empty)
FILE_STAT = WireMethod("file/stat", FileStatParams, FileInfo)
FILE_LIST = WireMethod("file/list", FileListParams, DirPage)
FILE_MAKE_DIR = WireMethod("file/makeDir", FileMakeDirParams, Empty)
FILE_REMOVE = WireMethod("file/remove", FileRemoveParams, Empty)
FILE_MOVE = WireMethod("file/move", FileMoveParams, Empty)
FILE_COPY = WireMethod("file/copy", FileCopyParams, Empty)
FILE_MAKE_LINK = WireMethod("file/makeLink", FileMakeLinkParams, Empty)
FILE_SET_ATTRIBUTES = WireMethod("file/setAttributes", FileSetAttributesParams, Empty)
FILE_REAL_PATH = WireMethod("file/realPath", FileRealPathParams, FileRealPathResult)
FILE_WATCH = WireMethod("file/watch", FileWatchParams, Empty)
FILE_READ_WATCH = WireMethod("file/readWatch", FileReadWatchParams, WatchRead)
FILE_UNWATCH = WireMethod("file/unwatch", FileUnwatchParams, Empty)

FS_READ_FILE = WireMethod("fs/readFile", FsPathParams, FsReadFileResult)
FS_WRITE_FILE = WireMethod("fs/writeFile", FsWriteFileParams, Empty)
FS_CREATE_DIRECTORY = WireMethod("fs/createDirectory", FsCreateDirectoryParams, Empty)
FS_GET_METADATA = WireMethod("fs/getMetadata", FsPathParams, FsMetadata)
FS_CANONICALIZE = WireMethod("fs/canonicalize", FsPathParams, FileRealPathResult)
FS_READ_DIRECTORY = WireMethod("fs/readDirectory", FsPathParams, FsReadDirectoryResult)
FS_REMOVE = WireMethod("fs/remove", FsRemoveParams, Empty)
FS_COPY = WireMethod("fs/copy", FsCopyParams, Empty)
FS_OPEN = WireMethod("fs/open", FsOpenParams, FsHandle)
FS_READ_BLOCK = WireMethod("fs/readBlock", FsReadBlockParams, FsBlock)
FS_CLOSE = WireMethod("fs/close", FsHandle, Empty)
FS_WRITE_BLOCK = WireMethod("fs/writeBlock", FsWriteBlockParams, Empty)
FS_WALK = WireMethod("fs/walk", FsWalkParams, FsWalkResult)
FS_WATCH_MISSING = WireMethod("fs/watchMissing", FsWatchMissingParams, FsWatchMissingResult)
