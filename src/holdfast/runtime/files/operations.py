"""File operations in plain system calls: in a thread of the server, or in a helper that runs as another user.

The helper is started as `python -I -S operations.py`, becomes the user of its first message, and then performs the
requests from stdin until end of file. Standard library only, no other module of this package, and every import at
the top: that user may be unable to read the library, so `serve` refuses imports before it changes the user.
Messages are encoded by `marshal`; errors of a path are `OSError`, and any other exception ends the helper with its
text on stderr.
"""

from __future__ import annotations

import errno
import heapq
import marshal
import os
import resource
import shutil
import stat
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

    Info = tuple[str, int, int, int, int, int, str | None]

#: By the bits of `st_mode`.
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character",
    stat.S_IFBLK: "block",
}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Errors of a directory in which files can be changed and not made: a bind mount, a read-only root.
_NO_TEMPORARY = (errno.EACCES, errno.EPERM, errno.EROFS)
_COPY_BYTES = 1024 * 1024
#: Ids of ended uploads that are kept: a late piece must not begin an upload again.
_KEPT_IDS = 4_096
LENGTH_BYTES = 8


class Upload:
    """An unfinished file: written under a temporary name, or in place where no other file can be made."""

    def __init__(
        self, fd: int, directory: int, name: str, temporary: str | None, replaced: os.stat_result | None
    ) -> None:
        self.fd = fd
        #: Held open, and all names are resolved in it: a link may redirect its path meanwhile.
        self.directory = directory
        self.name = name
        self.temporary = temporary
        self.replaced = replaced
        #: A descriptor must not be closed while another thread writes to it: the number may be reused.
        self.lock = threading.Lock()
        self.over = False

    def close(self) -> None:
        if not self.over:
            self.over = True
            os.close(self.fd)
            os.close(self.directory)


class FileOperations:
    """The operations by name, and the open uploads. Used from several threads."""

    def __init__(self, max_uploads: int) -> None:
        self.max_uploads = max_uploads
        self.uploads: dict[str, Upload] = {}
        #: Ids of ended uploads, each with the number and the text of the error that ended it.
        self._over: dict[str, tuple[int, str] | None] = {}

    def perform(self, operation: str, arguments: dict[str, Any]) -> Any:
        try:
            return getattr(self, f"do_{operation}")(**arguments)
        except RecursionError:
            # With the number for a path that is too long for the kernel: a tree this deep has such paths.
            raise OSError(errno.ENAMETOOLONG, "nested too deeply") from None

    # --- reading ---------------------------------------------------------------------------------------------

    def do_read(self, path: str, offset: int, size: int) -> tuple[int, bool, str, bytes]:
        fd = open_regular(path)
        try:
            found = os.fstat(fd)
            data = os.pread(fd, size, offset)
            # A file of /proc has the size 0; only an empty read is its end.
            eof = not data or (offset + len(data) >= found.st_size and found.st_size > 0)
            return found.st_size, eof, identity(found), data
        finally:
            os.close(fd)

    def do_stat(self, path: str, follow: bool) -> Info:
        return info(path, os.stat(path, follow_symlinks=follow))

    def do_list(self, path: str, after: str, limit: int) -> tuple[list[tuple[str, Info]], bool]:
        first = os.fsencode(after)
        with os.scandir(os.fsencode(path)) as entries:
            # Only the names of one page are held in memory.
            names = heapq.nsmallest(limit + 1, (entry.name for entry in entries if entry.name > first))
        page: list[tuple[str, Info]] = []
        for name in names[:limit]:
            whole = os.path.join(os.fsencode(path), name)
            try:
                page.append((os.fsdecode(name), info(os.fsdecode(whole), os.lstat(whole))))
            except FileNotFoundError:
                continue  # removed since
        return page, len(names) > limit

    def do_real_path(self, path: str, strict: bool) -> str:
        return os.path.realpath(path, strict=strict)

    # --- writing ---------------------------------------------------------------------------------------------

    def do_write(
        self, path: str, data: bytes, mode: int | None, mtime_ns: int | None, make_parents: bool, upload_id: str
    ) -> Info:
        self.do_write_piece(path, data, upload_id, 0, make_parents)
        return self.do_commit(path, upload_id, len(data), mode, mtime_ns)

    def do_write_at(self, path: str, offset: int, data: bytes, file_id: str) -> None:
        """Write into a file that exists, at an offset, if it is still the same file."""
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or identity(found) != file_id:
                raise FileNotFoundError(errno.ENOENT, "replaced since it was opened", path)
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(fd)

    def do_write_piece(self, path: str, data: bytes, upload_id: str, offset: int, make_parents: bool) -> None:
        upload = self.uploads.get(upload_id)
        if upload is None:
            upload = self._open(path, upload_id, make_parents, begins=offset == 0)
        view = memoryview(data)
        try:
            with upload.lock:
                while view:
                    if upload.over:
                        raise self._ended(path, upload_id)
                    written = os.pwrite(upload.fd, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as error:
            self._fail(path, upload_id, error)
            raise

    def _open(self, path: str, upload_id: str, make_parents: bool, *, begins: bool) -> Upload:
        """The upload of this id: a new one if this `begins` it, else the file that an earlier server has left.

        Only the first piece makes the file. If a later one did, the earlier part would be an unnoticed hole.
        """
        if upload_id in self._over:
            raise self._ended(path, upload_id)
        if len(self.uploads) >= self.max_uploads:
            raise OSError(errno.EUSERS, "max_uploads")
        # A link is followed, as by every other program: its target is replaced, and the link stays.
        target = os.path.realpath(path) if os.path.islink(path) else path
        above, name = os.path.split(target)
        if not name or name in (".", ".."):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if make_parents and above:
            _make_parents(above)
        with RenamedErrors(above, path):
            directory = os.open(above or ".", _DIRECTORY)
        try:
            upload = self._open_in(directory, name, path, upload_id, begins=begins)
        except BaseException:
            os.close(directory)
            raise
        first = self.uploads.setdefault(upload_id, upload)
        if first is not upload:  # another thread was faster; both have the same file open
            upload.close()
        return first

    def _open_in(self, directory: int, name: str, path: str, upload_id: str, *, begins: bool) -> Upload:
        """Open an upload in an open directory: from here on no path is resolved again."""
        replaced = writable_file(name, directory, path)
        # Made from the id, so that a restarted server finds the file of the one before.
        temporary = temporary_name(name, upload_id)
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if begins else 0)
        try:
            with RenamedErrors(temporary, path):
                fd = os.open(temporary, flags, 0o666 if replaced is None else 0o600, dir_fd=directory)
        except FileNotFoundError:
            if begins:
                raise
            raise OSError(errno.ESTALE, "the pieces before are gone: write it again", path) from None
        except OSError as error:
            if replaced is None or error.errno not in _NO_TEMPORARY:
                raise
            return Upload(open_in_place(name, directory, replaced, path), directory, name, None, replaced)
        try:
            check_own(fd, replaced)
            keep_owner(fd, replaced)
        except OSError as error:
            # No permission to change the owner: writing in place keeps it.
            os.close(fd)
            unlink_if_there(temporary, directory)
            if error.errno != errno.EPERM or replaced is None:
                raise
            return Upload(open_in_place(name, directory, replaced, path), directory, name, None, replaced)
        return Upload(fd, directory, name, temporary, replaced)

    def do_commit(self, path: str, upload_id: str, size: int, mode: int | None, mtime_ns: int | None) -> Info:
        upload = self.uploads.get(upload_id)
        if upload is None:
            upload = self._open(path, upload_id, True, begins=size == 0)
        try:
            with upload.lock:
                return self._finish(upload, upload_id, path, size, mode, mtime_ns)
        except OSError as error:
            self._fail(path, upload_id, error)
            raise

    def _finish(
        self, upload: Upload, upload_id: str, path: str, size: int, mode: int | None, mtime_ns: int | None
    ) -> Info:
        if upload.over:
            raise self._ended(path, upload_id)
        written = os.fstat(upload.fd).st_size
        if upload.temporary is not None and written != size:
            raise OSError(errno.EIO, f"{written} of {size} bytes were received: write it again", path)
        if upload.temporary is None:
            os.ftruncate(upload.fd, size)
        if mode is None and upload.replaced is not None:
            mode = stat.S_IMODE(upload.replaced.st_mode)
        if mode is not None and (upload.temporary is not None or mode != stat.S_IMODE(os.fstat(upload.fd).st_mode)):
            os.fchmod(upload.fd, mode)
        written_to = upload.fd
        if upload.temporary is not None:
            ends = {"src_dir_fd": upload.directory, "dst_dir_fd": upload.directory}
            try:
                with RenamedErrors(upload.temporary, path):
                    os.rename(upload.temporary, upload.name, **ends)
            except OSError as error:
                if error.errno != errno.EBUSY or upload.replaced is None:
                    raise
                # A mount point, such as /etc/hosts of a container: it can be written and not be replaced.
                written_to = open_in_place(upload.name, upload.directory, upload.replaced, path)
        try:
            if written_to != upload.fd:
                copy_into(upload, written_to)
            if mtime_ns is not None:
                os.utime(written_to, ns=(mtime_ns, mtime_ns))
            found = os.fstat(written_to)
        finally:
            if written_to != upload.fd:
                os.close(written_to)
        self._end(upload_id)
        upload.close()
        return info(path, found)

    def do_abandon(self, path: str, upload_id: str) -> None:
        upload = self._end(upload_id)
        if upload is not None:
            with upload.lock:
                if upload.temporary is not None and not upload.over:
                    unlink_if_there(upload.temporary, upload.directory)
                upload.close()
            return
        target = os.path.realpath(path) if os.path.islink(path) else path
        directory, name = os.path.split(target)
        if name:
            unlink_if_there(os.path.join(directory, temporary_name(name, upload_id)))

    def _fail(self, path: str, upload_id: str, error: OSError) -> None:
        """Abandon an upload, and keep the error for its other pieces: their replies may be sent first."""
        self._over.setdefault(upload_id, (error.errno or errno.EIO, error.strerror or str(error)))
        self.do_abandon(path, upload_id)

    def _ended(self, path: str, upload_id: str) -> OSError:
        """The error for a piece of an ended upload: that of the piece that failed, if one did."""
        number, text = self._over.get(upload_id) or (errno.ECANCELED, "the upload is over")
        return OSError(number, text, path)

    def _end(self, upload_id: str) -> Upload | None:
        self._over.setdefault(upload_id, None)
        while len(self._over) > _KEPT_IDS:
            self._over.pop(next(iter(self._over)), None)
        return self.uploads.pop(upload_id, None)

    # --- names -----------------------------------------------------------------------------------------------

    def do_make_dir(
        self, path: str, parents: bool, exist_ok: bool, mode: int | None, owner: int | None = None
    ) -> None:
        directory = os.path.dirname(path.rstrip("/"))
        if parents and directory:
            _make_parents(directory)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
            if not exist_ok:
                raise
            return  # it stays as it is: it may belong to another user, and `path` may be a link to it
        if mode is not None or owner is not None:
            # Not by its path: another process may have replaced it by a link since.
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if owner is not None:
                    if os.fstat(fd).st_uid != os.geteuid():
                        raise FileExistsError(17, "another user put a directory in its place", path)
                    os.fchown(fd, owner, owner)
                if mode is not None:
                    os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def do_remove(self, path: str, recursive: bool, missing_ok: bool) -> None:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if missing_ok:
                return
            raise
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(path)
        elif recursive:
            # On descriptors: a directory that is replaced by a link meanwhile is not followed.
            shutil.rmtree(path)
        else:
            os.rmdir(path)

    def do_move(self, source: str, target: str) -> None:
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.do_copy(source, target, True)
            self.do_remove(source, True, False)

    def do_copy(self, source: str, target: str, recursive: bool) -> None:
        found = os.lstat(source)
        if stat.S_ISLNK(found.st_mode):
            self.do_make_link(target, os.readlink(source))
        elif not stat.S_ISDIR(found.st_mode):
            with OpenDirectory(os.path.dirname(target) or ".", target) as above:
                copy_file(source, None, target, above, os.path.basename(target))
        elif not recursive:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), source)
        else:
            check_apart(source, target)
            os.makedirs(target, exist_ok=True)
            with OpenDirectory(source, source, nofollow=True) as inner, OpenDirectory(target, target) as outer:
                copy_tree(inner, outer, source, target)

    def do_make_link(self, path: str, target: str) -> None:
        directory, name = os.path.split(path)
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        temporary = os.path.join(directory, temporary_name(name, os.urandom(8).hex()))
        with RenamedErrors(temporary, path):
            os.symlink(target, temporary)
        try:
            with RenamedErrors(temporary, path):
                os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise

    def do_set_attributes(self, path: str, mode: int | None, mtime_ns: int | None) -> None:
        if mode is not None:
            os.chmod(path, mode)
        if mtime_ns is not None:
            os.utime(path, ns=(mtime_ns, mtime_ns))


def _make_parents(directory: str) -> None:
    """Make the directories of a path; a file in the place of the last one is the error that it is deeper down."""
    try:
        os.makedirs(directory, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


def identity(found: os.stat_result) -> str:
    return f"{found.st_dev:x}-{found.st_ino:x}"


def info(path: str, found: os.stat_result) -> Info:
    link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
    kind = KINDS.get(stat.S_IFMT(found.st_mode), "other")
    mode = stat.S_IMODE(found.st_mode)
    return kind, found.st_size, mode, found.st_mtime_ns, found.st_uid, found.st_gid, link


def temporary_name(name: str, upload_id: str) -> str:
    """A hidden name beside the file, short enough even for a name of the maximal length."""
    return os.fsdecode(b".%s.holdfast-%s" % (os.fsencode(name)[:180], os.fsencode(upload_id)))


class RenamedErrors:
    """A context in which an error that names `temporary` is changed to name `path`."""

    def __init__(self, temporary: str, path: str) -> None:
        self._temporary = temporary
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and self._temporary in (error.filename, error.filename2):
            error.filename = self._path


def open_regular(path: str, directory: int | None = None) -> int:
    """Open a regular file for reading; in a tree, `directory` is open and a link is refused.

    Other types are refused: a FIFO or a device could block for ever.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags if directory is None else flags | os.O_NOFOLLOW, dir_fd=directory)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def writable_file(name: str, directory: int, path: str) -> os.stat_result | None:
    """The status of the file that will be replaced, or None; an error if it may not be written."""
    try:
        found = os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if not os.access(name, os.W_OK, dir_fd=directory, effective_ids=True, follow_symlinks=False):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return found


def open_in_place(name: str, directory: int, replaced: os.stat_result, path: str) -> int:
    """Open the file with the status `replaced` for writing; an error for a link, or if it was replaced since."""
    with RenamedErrors(name, path):
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (replaced.st_dev, replaced.st_ino):
        os.close(fd)
        raise OSError(errno.EBADF, "was replaced while it was written", path)
    return fd


def check_own(fd: int, replaced: os.stat_result | None) -> None:
    """Check that a temporary file is regular, of this user, and has one name: another user may have made it."""
    found = os.fstat(fd)
    owners = (os.geteuid(), *(() if replaced is None else (replaced.st_uid,)))
    if found.st_uid not in owners or found.st_nlink != 1 or not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EBADF, "another user has replaced the file of the upload")


def keep_owner(fd: int, replaced: os.stat_result | None) -> None:
    if replaced is None:
        return
    found = os.fstat(fd)
    if (found.st_uid, found.st_gid) != (replaced.st_uid, replaced.st_gid):
        os.fchown(fd, replaced.st_uid, replaced.st_gid)


def unlink_if_there(name: str, directory: int | None = None) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return


class OpenDirectory:
    """A context with an open directory; `shown` is its name in errors."""

    def __init__(self, name: str, shown: str, directory: int | None = None, *, nofollow: bool = False) -> None:
        with RenamedErrors(name, shown):
            self._fd = os.open(name, _DIRECTORY | (os.O_NOFOLLOW if nofollow else 0), dir_fd=directory)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        os.close(self._fd)


def check_apart(source: str, target: str) -> None:
    """Refuse to copy a directory into itself, which would not terminate."""
    if f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(source)}/"):
        raise OSError(errno.EINVAL, "a directory cannot be copied into itself", target)


def copy_into(upload: Upload, writer: int) -> None:
    """Copy the content of an upload into an existing file, and remove the upload's own file."""
    assert upload.temporary is not None
    reader = os.open(upload.temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=upload.directory)
    try:
        for piece in pieces_of(reader):
            write_all(writer, piece)
        os.ftruncate(writer, os.fstat(reader).st_size)
    finally:
        os.close(reader)
    os.unlink(upload.temporary, dir_fd=upload.directory)


def copy_tree(source: int, target: int, source_path: str, target_path: str) -> None:
    """Copy the content of one open directory into another: names are resolved in it, and no link is followed."""
    for name in os.listdir(source):
        inner_path, outer_path = os.path.join(source_path, name), os.path.join(target_path, name)
        found = os.lstat(name, dir_fd=source)
        if stat.S_ISDIR(found.st_mode):
            with OpenDirectory(name, inner_path, source, nofollow=True) as inner:
                make_if_missing(name, target)
                with OpenDirectory(name, outer_path, target, nofollow=True) as outer:
                    copy_tree(inner, outer, inner_path, outer_path)
        elif stat.S_ISLNK(found.st_mode):
            temporary = temporary_name(name, os.urandom(8).hex())
            os.symlink(os.readlink(name, dir_fd=source), temporary, dir_fd=target)
            put_in_place(temporary, name, target, outer_path)
        else:
            copy_file(name, source, outer_path, target, name)
    kept = os.fstat(source)
    os.fchmod(target, stat.S_IMODE(kept.st_mode))
    os.utime(target, ns=(kept.st_mtime_ns, kept.st_mtime_ns))


def make_if_missing(name: str, directory: int) -> None:
    """Make a directory. An existing one is merged into; other types are refused when it is opened."""
    try:
        os.mkdir(name, dir_fd=directory)
    except FileExistsError:
        return


def copy_file(source: str, source_directory: int | None, target: str, directory: int, name: str) -> None:
    """Copy a regular file with its mode and time, atomically."""
    reader = open_regular(source, source_directory)
    try:
        found = os.fstat(reader)
        temporary = temporary_name(name, os.urandom(8).hex())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with RenamedErrors(temporary, target):
            writer = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            for piece in pieces_of(reader):
                write_all(writer, piece)
            os.fchmod(writer, stat.S_IMODE(found.st_mode) & 0o777)
            os.utime(writer, ns=(found.st_mtime_ns, found.st_mtime_ns))
        except OSError:
            os.unlink(temporary, dir_fd=directory)
            raise
        finally:
            os.close(writer)
        put_in_place(temporary, name, directory, target)
    finally:
        os.close(reader)


def put_in_place(temporary: str, name: str, directory: int, path: str) -> None:
    """Give a new file its name; on an error the file is removed."""
    try:
        with RenamedErrors(temporary, path):
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.unlink(temporary, dir_fd=directory)
        raise


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pieces_of(fd: int) -> Iterator[bytes]:
    while piece := os.read(fd, _COPY_BYTES):
        yield piece


# --- the helper process --------------------------------------------------------------------------------------


class ImportBlocker:
    """A finder that refuses every module that is not loaded yet."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        raise ImportError(f"module {name!r} is imported after the change of user: import it at the top of the file")


def refuse_imports() -> None:
    """Make each import of a module that is not loaded an error, on every machine.

    Without this an import would fail only where the new user cannot read Python's library.
    """
    sys.meta_path[:] = [ImportBlocker()]


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Become another user irrevocably; a failure ends the helper with the step that failed."""
    step = ""
    try:
        step = "setgroups"
        os.setgroups(groups)
        step = "setresgid"
        os.setresgid(gid, gid, gid)
        step = "setresuid"
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise SystemExit(f"cannot change to uid {uid}, gid {gid}: {step}: {error.strerror}") from None
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise SystemExit(f"cannot change to uid {uid}, gid {gid}: the ids differ afterwards")


def read_message(source: IO[bytes]) -> Any:
    header = source.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        raise EOFError
    size = int.from_bytes(header, "big")
    body = source.read(size)
    if len(body) < size:
        raise EOFError
    return marshal.loads(body)


def write_message(sink: IO[bytes], message: Any) -> None:
    body = marshal.dumps(message)
    sink.write(len(body).to_bytes(LENGTH_BYTES, "big"))
    sink.write(body)
    sink.flush()


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    uid, gid, groups, max_uploads = read_message(source)
    # Remove the mark of a process that the server spawned at the same time: a kill of its tree would kill this one.
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))
    refuse_imports()
    if uid is not None:  # else a jail has determined it
        become(uid, gid, groups)
    work = FileOperations(max_uploads)
    while True:
        try:
            operation, arguments = read_message(source)
        except EOFError:
            break
        failure = result = None
        try:
            result = work.perform(operation, arguments)
        except OSError as error:
            failure = (error.errno, error.strerror or str(error), error.filename)
        write_message(sink, (failure, result))
    # Unfinished uploads stay: the server may have died, and the next one resumes them.


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
