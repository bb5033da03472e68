"""The helper process that works on files as another user: its rights, its imports, and its failures."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.config import ExecServerConfig
from holdfast.errors import CwdNotFound, FileError, HelperFailed, ResourceExhausted
from holdfast.launch import self_exec
from holdfast.runtime.files import operations
from holdfast.runtime.files.local_files import LocalFiles
from holdfast.runtime.files.operations import FileOperations
from holdfast.runtime.files.user_helpers import UserHelper, UserHelpers, _HelperClosed
from holdfast.runtime.process.environment import resolve_user
from holdfast.runtime.tree.process_table import new_mark, read_mark
from tests.support.parts import needs
from tests.support.servers import server_environment

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = "65534:65534"
#: Each operation of `FileOperations` in an order that works in an empty directory, as `{place}`.
OPERATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("make_dir", {"path": "{place}/d/e", "parents": True, "exist_ok": False, "mode": 0o700}),
    (
        "write",
        {
            "path": "{place}/d/small",
            "data": b"content",
            "mode": 0o640,
            "mtime_ns": 1,
            "make_parents": True,
            "upload_id": "a",
        },
    ),
    (
        "write_piece",
        {"path": "{place}/d/e/large", "data": b"piece", "upload_id": "b", "offset": 0, "make_parents": True},
    ),
    ("commit", {"path": "{place}/d/e/large", "upload_id": "b", "size": 5, "mode": None, "mtime_ns": None}),
    (
        "write_piece",
        {"path": "{place}/d/no", "data": b"piece", "upload_id": "c", "offset": 0, "make_parents": True},
    ),
    ("abandon", {"path": "{place}/d/no", "upload_id": "c"}),
    ("read", {"path": "{place}/d/small", "offset": 0, "size": 100}),
    # The id is that of no file: the answer is an error, and nothing is written.
    ("write_at", {"path": "{place}/d/small", "offset": 0, "data": b"x", "file_id": "0-0"}),
    ("stat", {"path": "{place}/d", "follow": True}),
    ("make_link", {"path": "{place}/d/link", "target": "small"}),
    ("real_path", {"path": "{place}/d/link", "strict": True}),
    ("set_attributes", {"path": "{place}/d/small", "mode": 0o600, "mtime_ns": 2}),
    ("copy", {"source": "{place}/d", "target": "{place}/copied", "recursive": True}),
    ("move", {"source": "{place}/copied", "target": "{place}/moved"}),
    ("list", {"path": "{place}/moved", "after": "", "limit": 10}),
    ("remove", {"path": "{place}/moved", "recursive": True, "missing_ok": False}),
)
#: Performs `OPERATIONS` as the user and prints the result of each, or the error.
PERFORM = """
import json, sys
from holdfast.runtime.process.environment import resolve_user
from holdfast.runtime.files.user_helpers import UserHelpers
from tests.process.test_file_helpers import NOBODY, OPERATIONS

children, results = UserHelpers(8), {}
for operation, arguments in OPERATIONS:
    filled = {k: v.format(place=sys.argv[1]) if isinstance(v, str) else v for k, v in arguments.items()}
    try:
        results[operation] = repr(children.perform(resolve_user(NOBODY), operation, filled))
    except Exception as error:
        results[operation] = f"{type(error).__name__}: {error}"
children.close()
print(json.dumps({"prefix": sys.prefix, "results": results}))
"""


@pytest.fixture
def location() -> Iterator[Path]:
    """A directory in which every user may make files; each run of pytest closes its own directory to others."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "place")
        found.mkdir()
        for each in (found.parent, found):
            each.chmod(0o777)
        yield found


@pytest.fixture
def deep_tree(location: Path) -> Iterator[Path]:
    """A tree with more levels than Python has frames. `rm` takes it away, which needs none."""
    levels = "/".join(["d"] * (sys.getrecursionlimit() + 100))
    subprocess.run(["mkdir", "-p", location / "deep" / levels], check=True)
    yield location / "deep"
    subprocess.run(["rm", "-rf", location / "deep", location / "copy"], check=True)


@pytest.fixture
def children() -> Iterator[UserHelpers]:
    children = UserHelpers(8)
    yield children
    children.close()


@pytest.fixture
def closed_python(tmp_path: Path) -> str:
    """An interpreter with a library below a directory that only its owner may enter."""
    home = tmp_path / "closed"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / f"python3.{sys.version_info[1]}"
    shutil.copy(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), program)
    (home / sys.platlibdir).symlink_to(Path(sys.base_prefix, sys.platlibdir))
    home.chmod(0o700)
    return str(program)


def perform_all(python: str, location: Path, *before: str) -> dict[str, str]:
    libraries = (Path(__file__).parents[1], Path(msgspec.__file__).parents[1], Path(pytest.__file__).parents[1])
    environment = server_environment()
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *map(str, libraries)])
    done = subprocess.run(
        [*before, python, "-S", "-c", PERFORM, str(location)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    if "closed" in python:
        assert printed["prefix"] == os.path.dirname(os.path.dirname(python))
    results: dict[str, str] = printed["results"]
    return results


def test_every_operation_is_among_these() -> None:
    known = {name.removeprefix("do_") for name in vars(FileOperations) if name.startswith("do_")}
    assert {operation for operation, _ in OPERATIONS} == known


@needs_root
def test_the_user_need_not_be_able_to_read_python(closed_python: str, location: Path) -> None:
    results = perform_all(closed_python, location)
    assert "replaced since it was opened" in results.pop("write_at")
    assert not {name: text for name, text in results.items() if "Error" in text or "Failed" in text}
    assert "b'content'" in results["read"]
    assert all(name in results["list"] for name in ("'e'", "'link'", "'small'"))
    assert sorted(os.listdir(location)) == ["d"]
    assert {(location / "d" / name).stat().st_uid for name in ("e", "small")} == {65534}


def test_nothing_is_imported_late() -> None:
    """By the text: what an operation imports only in a rare case counts as well."""
    tree = ast.parse(inspect.getsource(operations))
    inside = [
        (function.name, node.lineno)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []


def test_an_import_after_the_change_of_user_is_an_error() -> None:
    script = "import operations, os.path; operations.refuse_imports(); import stat; import json.decoder"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=os.path.dirname(operations.__file__),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: module 'json' is imported after the change of user"
    )


@needs_root
def test_the_helper_refuses_imports(
    children: UserHelpers, location: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every machine, also where the user could read the library."""
    source = Path(operations.__file__).read_text()
    late = source.replace(
        "    def do_stat(self, path: str, follow: bool) -> Info:\n",
        "    def do_stat(self, path: str, follow: bool) -> Info:\n        import json\n\n",
    )
    assert late != source
    (tmp_path / "late.py").write_text(late)
    monkeypatch.setattr("holdfast.runtime.files.user_helpers._PROGRAM", str(tmp_path / "late.py"))
    with pytest.raises(HelperFailed, match="as 'nobody' failed: ImportError: module 'json' is imported after"):
        children.perform(resolve_user(NOBODY), "stat", {"path": str(location), "follow": True})


# --- failures of the helper itself --------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/python"], "cannot be started: No such file or directory: /no/such/python"),
        (["/etc/passwd"], "cannot be started: Permission denied: /etc/passwd"),
        (["/bin/sh", "-c", "echo no loader >&2; exit 127"], "failed: no loader"),
        (["/bin/sh", "-c", "exit 3"], "failed: it ended with exit status 3"),
        (["/bin/sh", "-c", "kill -9 $$"], "failed: killed by signal 9"),
    ],
)
async def test_a_helper_that_does_not_start_is_no_error_of_the_path(
    command: list[str], words: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_exec, "command", lambda: command)
    files = LocalFiles(ExecServerConfig())
    try:
        for _ in range(2):
            with pytest.raises(HelperFailed) as failed:
                await files.write(str(location / "file"), bytes(100_000), user=NOBODY)
            assert words in str(failed.value)
            assert not isinstance(failed.value, OSError)
        monkeypatch.undo()
        await files.write(str(location / "file"), b"x", user=NOBODY)
    finally:
        await files.aclose()


@needs_root
@pytest.mark.parametrize("left", range(8))
def test_no_descriptors_for_a_helper_is_no_error_of_the_path(children: UserHelpers, left: int) -> None:
    """Wherever on its way to a helper the server runs out: pipes for its streams, and one to learn of its exec."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    user = resolve_user(NOBODY)
    with contextlib.ExitStack() as stack:
        # The limit is one of numbers: without holes below the highest, it is one of descriptors.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= highest:
            stack.callback(os.close, fd)
        os.close(fd)
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + left, hard))
        try:
            with pytest.raises(ResourceExhausted, match="helper process for files as 'nobody' cannot be started"):
                children.perform(user, "stat", {"path": "/", "follow": True})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == before


@needs_root
@needs("setpriv")
def test_a_server_that_may_not_change_users(location: Path) -> None:
    """Root in a container without the capabilities."""
    results = perform_all(sys.executable, location, "setpriv", "--bounding-set", "-setuid,-setgid")
    refused = "cannot change to uid 65534, gid 65534: setgroups: Operation not permitted"
    assert set(results.values()) == {f"HelperFailed: the helper process for files as 'nobody' failed: {refused}"}
    assert os.listdir(location) == []


@needs_root
def test_a_helper_that_is_killed_is_replaced(children: UserHelpers) -> None:
    account, looking = resolve_user(NOBODY), {"path": "/", "follow": True}
    children.perform(account, "stat", looking)
    child = children._helper(account)
    child._process.kill()
    with pytest.raises(HelperFailed, match="failed: killed by signal 9"):
        child.perform("stat", looking)
    with pytest.raises(_HelperClosed):
        child.perform("stat", looking)
    assert children.perform(account, "stat", looking)[0] == "directory"
    assert children._helper(account) is not child


@needs_root
def test_a_request_for_a_helper_that_is_being_closed_goes_to_another(
    children: UserHelpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, looking = resolve_user(NOBODY), {"path": "/", "follow": True}
    closed = UserHelper(account, 8)
    closed.close()
    taken = iter([closed])
    take = children._helper
    monkeypatch.setattr(children, "_helper", lambda account: next(taken, None) or take(account))
    assert children.perform(account, "stat", looking)[0] == "directory"


@needs_root
def test_a_helper_carries_no_mark(children: UserHelpers) -> None:
    """The server has the mark of another process for the moment of that process's start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("the hard limit leaves no room for marks")
    mark = new_mark()
    resource.setrlimit(resource.RLIMIT_RTTIME, (mark, hard))
    try:
        children.perform(resolve_user(NOBODY), "stat", {"path": "/", "follow": True})
    finally:
        resource.setrlimit(resource.RLIMIT_RTTIME, (soft, hard))
    assert read_mark(children._helper(resolve_user(NOBODY))._process.pid) is None


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=needs_root)])
async def test_a_tree_that_is_too_deep_is_an_error_of_the_path(user: str | None, deep_tree: Path) -> None:
    files = LocalFiles(ExecServerConfig())
    try:
        with pytest.raises(FileError, match="deep: nested too deeply"):
            await files.copy(str(deep_tree), str(deep_tree.parent / "copy"), recursive=True, user=user)
        await files.stat(str(deep_tree), user=user)
    finally:
        await files.aclose()


@needs_root
async def test_without_a_working_directory_whole_paths_work(
    location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    files = LocalFiles(ExecServerConfig())
    try:
        monkeypatch.setattr(os, "getcwd", gone)
        await files.write(str(location / "file"), b"x", user=NOBODY)
        with pytest.raises(CwdNotFound):
            await files.write("file", b"x", user=NOBODY)
    finally:
        monkeypatch.undo()
        await files.aclose()
