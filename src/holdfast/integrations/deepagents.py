"""A DeepAgents backend: the shell and the files of an agent are those of a sandbox.

`BaseSandbox` derives its file tools from `execute`, `upload_files` and `download_files`; listing, writing and
deleting are calls of the file API here, so that they need no Python in the sandbox. The backend serves both kinds
of agents: `invoke` calls from any thread, `ainvoke` from any event loop.
"""

from __future__ import annotations

import json
import posixpath
import secrets
from collections.abc import Coroutine
from typing import Any, Final, Literal, TypeVar

from deepagents.backends.protocol import (
    DeleteResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileInfo,
    FileUploadResponse,
    GlobResult,
    LsResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

import holdfast
from holdfast import sync
from holdfast.client.command import oom_note
from holdfast.client.loops import await_in, run_in
from holdfast.errors import (
    EXIT_TIMED_OUT,
    FileError,
    FileNotFound,
    HoldfastError,
    IsADirectory,
    NotADirectory,
    PermissionRefused,
)
from holdfast.fleet.fleet import FleetSandbox

T = TypeVar("T")

#: `glob` of deepagents 0.6: relative paths, and directories as well.
_GLOB: Final = """\
import glob, json, os, sys
os.chdir(sys.argv[1])
found = sorted(glob.glob(sys.argv[2], recursive=True))
print(json.dumps([{"path": path, "is_dir": os.path.isdir(path)} for path in found]))
"""
#: The version of deepagents whose interface a backend has. langchain-tests 1.1.9 tests that of 0.6.
Contract = Literal["0.6", "0.7"]
#: The timeout of a command without one, in seconds: a build fits, and a command that hangs ends within the hour.
DEFAULT_TIMEOUT: Final = 1800.0


class Backend(BaseSandbox):
    """`create_deep_agent(backend=Backend(box))`. The caller owns `box`, which may be blocking or async."""

    def __init__(
        self,
        box: sync.Sandbox | holdfast.Sandbox,
        *,
        shell: str = "sh",
        timeout: float = DEFAULT_TIMEOUT,
        contract: Contract = "0.6",
    ) -> None:
        """`shell` runs each command by `-c`.

        By the `contract` of deepagents 0.6, which LangChain's suite tests, `write` refuses an existing file, and
        paths of `glob` are relative. By that of 0.7, `write` replaces a file, and paths are absolute, which the
        framework's `deny` rules need.
        """
        self._box = box.asynchronous if isinstance(box, sync.Sandbox) else box
        self._loop = self._box.loop
        self._contract = contract
        self._shell = shell
        self._timeout = timeout
        ref = self._box.ref if isinstance(self._box, FleetSandbox) else None
        self._id = f"holdfast-{secrets.token_hex(4)}" if ref is None else ref.id

    @property
    def id(self) -> str:
        return self._id

    # --- commands ------------------------------------------------------------------------------------------------

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command; 0 as its `timeout` is none. A command that times out has exit code 124."""
        return run_in(self._loop, self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return await await_in(self._loop, self._execute(command, timeout))

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        seconds = self._timeout if timeout is None else timeout or None
        try:
            result = await self._box.exec(
                [self._shell, "-c", command], timeout=seconds, merge_stderr=True, start_errors="result"
            )
        except holdfast.TimeoutError as error:
            return ExecuteResponse(output=f"{error.stdout}\n{error}", exit_code=EXIT_TIMED_OUT)
        output = result.stdout + result.stderr + oom_note(result.oom)
        return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=result.truncated)

    # --- files ---------------------------------------------------------------------------------------------------

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return run_in(self._loop, self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await await_in(self._loop, self._upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return run_in(self._loop, self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await await_in(self._loop, self._download(paths))

    def ls(self, path: str) -> LsResult:
        return run_in(self._loop, self._ls(path))

    async def als(self, path: str) -> LsResult:
        return await await_in(self._loop, self._ls(path))

    def delete(self, file_path: str) -> DeleteResult:
        return run_in(self._loop, self._delete(file_path))

    async def adelete(self, file_path: str) -> DeleteResult:
        return await await_in(self._loop, self._delete(file_path))

    def _write_preflight(self, file_path: str) -> WriteResult | None:
        return run_in(self._loop, self._check_new(file_path))

    async def _awrite_preflight(self, file_path: str) -> WriteResult | None:
        return await await_in(self._loop, self._check_new(file_path))

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        if self._contract == "0.6":
            return run_in(self._loop, self._relative_glob(pattern, path))
        return super().glob(pattern, path)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        if self._contract == "0.6":
            return await await_in(self._loop, self._relative_glob(pattern, path))
        return await super().aglob(pattern, path)

    async def _check_new(self, file_path: str) -> WriteResult | None:
        # There is nothing else to prepare: an upload creates the directories above the file.
        if self._contract == "0.6" and await self._box.exists(file_path):
            return WriteResult(
                error=f"Cannot write to '{file_path}': it already exists; edit it, or delete it first"
            )
        return None

    async def _relative_glob(self, pattern: str, path: str | None) -> GlobResult:
        result = await self._box.exec(["python3", "-c", _GLOB, path or "/", pattern], timeout=self._timeout)
        if not result.success:
            return GlobResult(error=f"Path '{path}': {result.stderr.strip()[-200:]}")
        return GlobResult(matches=json.loads(result.stdout))

    async def _upload(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        responses = []
        for path, data in files:
            _, error = await _attempt(path, self._box.write_file(path, data))
            responses.append(FileUploadResponse(path=path, error=error))
        return responses

    async def _download(self, paths: list[str]) -> list[FileDownloadResponse]:
        responses = []
        for path in paths:
            content, error = await _attempt(path, self._box.read_file(path))
            responses.append(FileDownloadResponse(path=path, content=content, error=error))
        return responses

    async def _ls(self, path: str) -> LsResult:
        try:
            entries = await self._box.list_dir(path)
        except (FileError, PermissionRefused) as error:
            return LsResult(entries=None, error=f"Path '{path}': {_reason(error)}")
        return LsResult(
            entries=[
                FileInfo(path=posixpath.join(path, each.name), is_dir=each.type == "directory") for each in entries
            ]
        )

    async def _delete(self, file_path: str) -> DeleteResult:
        try:
            await self._box.remove(file_path, recursive=True)
        except (FileNotFound, NotADirectory):
            return DeleteResult(error=f"Error: '{file_path}' not found")
        except (FileError, PermissionRefused) as error:
            return DeleteResult(error=f"Error deleting file '{file_path}': {error}")
        return DeleteResult(path=file_path)


async def _attempt(path: str, work: Coroutine[Any, Any, T]) -> tuple[T | None, str | None]:
    """Perform one file operation of several; returns its result, and its error in the words of the framework."""
    if not posixpath.isabs(path):
        work.close()
        return None, "invalid_path"
    try:
        return await work, None
    except (FileError, PermissionRefused) as error:
        return None, _reason(error)


def _reason(error: HoldfastError) -> str:
    match error:
        case FileNotFound():
            return "file_not_found"
        case IsADirectory():
            return "is_directory"
        case NotADirectory():
            return "invalid_path"
        case PermissionRefused():
            return "permission_denied"
        case _:
            return error.message
