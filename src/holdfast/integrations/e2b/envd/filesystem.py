"""`filesystem.Filesystem` of envd without its watchers: files and directories of one sandbox by path."""

from __future__ import annotations

import datetime
import posixpath
import stat
from typing import Any, Final

from holdfast.errors import FileExists, FileNotFound
from holdfast.integrations.e2b.envd import messages as m
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem, invalid
from holdfast.types import FileInfo

#: Entries of one `ListDir`: the reply is one message.
MAX_ENTRIES: Final = 50_000
_TYPES: Final = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_MODES: Final = {
    "file": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "fifo": stat.S_IFIFO,
    "socket": stat.S_IFSOCK,
    "character": stat.S_IFCHR,
    "block": stat.S_IFBLK,
}


async def entry(opened: OpenSandbox, path: str, info: FileInfo) -> dict[str, Any]:
    """The `EntryInfo` of a file."""
    owner, group = await opened.owner(info.uid, info.gid)
    seconds, nanoseconds = divmod(info.mtime_ns, 1_000_000_000)
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    shown: dict[str, Any] = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(info.type, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": str(info.size),
        "mode": info.mode,
        "permissions": stat.filemode(_MODES.get(info.type, 0) | info.mode),
        "owner": owner,
        "group": group,
        "modifiedTime": f"{when}.{nanoseconds:09}Z",
    }
    if info.type == "symlink":
        shown["isSymlink"] = True
        shown["symlinkTarget"] = info.target or ""
    return shown


async def stat_file(opened: OpenSandbox, path: str, user: str) -> dict[str, Any]:
    path = await opened.path(path, user)
    return {"entry": await entry(opened, path, await opened.box.stat(path, follow=False, user=opened.run_as(user)))}


async def make_dir(opened: OpenSandbox, path: str, user: str) -> dict[str, Any]:
    path = await opened.path(path, user)
    run_as = opened.run_as(user)
    try:
        found = await opened.box.stat(path, user=run_as)
    except FileNotFound:
        try:
            await opened.box.make_dir(path, exist_ok=False, user=run_as)
        except FileExists as error:
            raise Problem(409, "already_exists", error.message) from None
        return await stat_file(opened, path, user)
    if found.type != "directory":
        raise invalid(f"{path}: exists and is not a directory")
    raise Problem(409, "already_exists", f"directory already exists: {path}")


async def move(opened: OpenSandbox, request: m.MoveRequest, user: str) -> dict[str, Any]:
    source, target = await opened.path(request.source, user), await opened.path(request.destination, user)
    run_as = opened.run_as(user)
    parent = posixpath.dirname(target)
    await opened.box.stat(source, follow=False, user=run_as)
    await opened.box.make_dir(parent, user=run_as)
    await opened.box.move(source, target, user=run_as)
    return await stat_file(opened, target, user)


async def remove(opened: OpenSandbox, path: str, user: str) -> None:
    path = await opened.path(path, user)
    if path == "/":
        raise invalid("path: '/' cannot be removed")
    await opened.box.remove(path, recursive=True, missing_ok=True, user=opened.run_as(user))


async def list_dir(opened: OpenSandbox, request: m.ListDirRequest, user: str) -> dict[str, Any]:
    """The entries of a directory and of `depth - 1` levels below it; links are not followed below the first."""
    top, run_as = await opened.path(request.path, user), opened.run_as(user)
    depth = max(1, request.depth)
    if (await opened.box.stat(top, user=run_as)).type != "directory":
        raise invalid(f"{top}: not a directory")
    found: list[dict[str, Any]] = []
    pending = [(top, 1)]
    while pending:
        directory, level = pending.pop(0)
        for each in await opened.box.list_dir(directory, user=run_as):
            path = posixpath.join(directory, each.name)
            found.append(await entry(opened, path, each))
            if each.type == "directory" and level < depth:
                pending.append((path, level + 1))
        if len(found) > MAX_ENTRIES:
            raise Problem(413, "resource_exhausted", f"{top}: more than {MAX_ENTRIES} entries: reduce depth")
    return {"entries": sorted(found, key=lambda each: each["path"].split("/"))}
