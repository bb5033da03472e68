"""Sessions of a root service run as users of their own: which, and that files of the machine stay closed to them.

Files that only root may read are made under names of these tests in /etc and /opt, where every jail can read, and
removed again. Set-id bits are tried with every system call that could give one.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import holdfast
from holdfast.errors import InvalidParams
from holdfast.runtime.confine.features import detect_features
from holdfast.runtime.confine.seccomp import ARCHITECTURES
from holdfast.service.access.session_users import UidRange, check_free, parse_uids
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.backend.enforcement import needs_user
from holdfast.service.settings import load_settings
from holdfast.service.types import SessionPolicy
from holdfast.types import Confinement, EnvironmentInfo, ShellInfo
from tests.service.conftest import OpenStore
from tests.service.running_service import RunningService, ServiceHome, new_home, running_service
from tests.support.parts import needs as needs_program

OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
PYTHON: Final = "/usr/bin/python3"
SECRET: Final = "for-root-alone"
FIRST: Final = 1_900_200_000
UID: Final = 1_900_300_000
MODES = [
    pytest.param(mode, marks=pytest.mark.skipif(bool(OFFERED[mode]), reason=f"no {mode} here: {OFFERED[mode]}"))
    for mode in ("bubblewrap", "landlock")
]
as_root = pytest.mark.skipif(bool(OFFERED["users"]), reason=f"no other users: {OFFERED['users']}")
needs_jail = pytest.mark.skipif(bool(OFFERED["bubblewrap"]), reason=f"no jail: {OFFERED['bubblewrap']}")


# --- which uid ---------------------------------------------------------------------------------------------------


async def test_an_agent_has_one_uid_in_every_replica_for_good(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    uids = UidRange(FIRST, FIRST + 9)
    names = [f"agent{number}" for number in range(10)]
    found = await asyncio.gather(*(store.session_uid(name, uids) for name in names for store in (one, two)))
    assert found[::2] == found[1::2]
    assert sorted(set(found)) == list(range(FIRST, FIRST + 10))
    # None is left, and none is given twice; an agent keeps its own when the range is another.
    with pytest.raises(NotNow, match="widen session_uids") as refused:
        await one.session_uid("late", uids)
    assert refused.value.reason == "NO_UID_LEFT"
    later = UidRange(FIRST + 100, FIRST + 199)
    assert await two.session_uid("late", later) == FIRST + 100
    assert await one.session_uid("agent3", later) == found[6]


def test_a_range_that_cannot_be_used_is_refused() -> None:
    assert parse_uids("1900000000-1900065535") == UidRange(1_900_000_000, 1_900_065_535)
    for wrong in ("", "1000", "0-5", "999-2000", "2000-1999", "60000-70000", "1-x", "2147483000-2147483648"):
        with pytest.raises(InvalidParams, match="session_uids"):
            load_settings(environ={}, session_uids=wrong)


def test_a_range_that_others_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("ann:100000:65536\n# no range\nbob:x:1\n")
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\napp:x:300000:300000::/:/bin/sh\n")
    check_free(UidRange(165_536, 200_000), str(tmp_path))
    for uids in (UidRange(165_535, 200_000), UidRange(2_000, 100_000), UidRange(110_000, 110_001)):
        with pytest.raises(InvalidParams, match=r"of 'ann' in /etc/subuid: choose a range"):
            check_free(uids, str(tmp_path))
    with pytest.raises(InvalidParams, match=r"of 'app' in /etc/passwd"):
        check_free(UidRange(300_000, 300_000), str(tmp_path))


def server_of(user: str, *features: str) -> EnvironmentInfo:
    return EnvironmentInfo(ShellInfo("sh", "/bin/sh"), "/", user, "/", "host", "Linux", "x86_64", "0", features)


def test_sessions_of_a_root_server_have_a_user_or_are_refused() -> None:
    policy = SessionPolicy("default", 1, 1, 1)
    trusted = SessionPolicy("trusted", 1, 1, 1, user="server")
    strict = SessionPolicy("strict", 1, 1, 1, user="own")
    assert needs_user(policy, "local", server_of("root", "users"))
    assert not needs_user(policy, "docker:web", server_of("root", "users"))
    assert needs_user(strict, "docker:web", server_of("root", "users"))
    assert not needs_user(trusted, "local", server_of("root", "users"))
    assert not needs_user(trusted, "local", server_of("root"))
    assert not needs_user(policy, "local", server_of("service"))
    for root in ("root", "0"):
        with pytest.raises(Denied, match="cannot run the session as another user") as refused:
            needs_user(policy, "local", server_of(root))
        assert refused.value.reason == "GUARD_UNAVAILABLE"


# --- files of the machine ----------------------------------------------------------------------------------------


@contextmanager
def directory_in(parent: str) -> Iterator[Path]:
    """A directory that others may enter, removed in the end."""
    directory = Path(tempfile.mkdtemp(prefix="hf-user-", dir=parent))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def write_private(path: Path) -> Path:
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


RULES = """
workspaces = "{workspaces}"
profiles.default.resources.memory_bytes = "unlimited"
profiles.landlock.sandbox.mode = "landlock"
profiles.none.sandbox.mode = "none"
profiles.trusted.sandbox.user = "server"
"""


@pytest.fixture(scope="module")
def workspaces() -> Iterator[Path]:
    with directory_in("/tmp") as directory:
        yield directory


@pytest.fixture(scope="module")
def service(home: ServiceHome, workspaces: Path) -> Iterator[RunningService]:
    rules = os.path.join(home.directory, "rules.toml")
    Path(rules).write_text(RULES.format(workspaces=workspaces))
    uids = f"{FIRST}-{FIRST + 99}"
    with running_service(home, "--rules", rules, HOLDFAST_SERVICE_SESSION_UIDS=uids) as started:
        yield started


def opened(service: RunningService, token: str, kind: str = "SHELL", **fields: Any) -> str:
    return str(service.call("CreateSession", token, kind=kind, **fields)["sessionId"])


def ran(service: RunningService, token: str, session: str, command: str) -> str:
    done = service.call("RunCommand", token, sessionId=session, command=command)
    return b"".join(base64.b64decode(done.get(stream, "")) for stream in ("stdout", "stderr")).decode()


@as_root
@needs_jail
def test_what_root_alone_may_read_is_closed_to_a_session(service: RunningService, home: ServiceHome) -> None:
    token = home.new_agent("reader")
    with directory_in("/etc") as etc, directory_in("/opt") as opt:
        deep = etc / "a" / "b" / "c" / "d"
        deep.mkdir(parents=True)
        files = [write_private(each) for each in (opt / "key", deep / "key", etc / "masked")]
        session = opened(service, token)
        # As `passwd` writes: the mask was on the file that is replaced.
        os.replace(write_private(etc / "new"), etc / "masked")
        files.append(write_private(etc / "later"))
        (etc / "open").write_text("for everybody")
        assert "for everybody" in ran(service, token, session, f"cat {etc}/open")
        for path in files:
            assert SECRET not in ran(service, token, session, f"cat {path}; tail -c 99 {path}"), path


@as_root
@needs_jail
def test_each_agent_has_a_user_and_a_workspace_of_its_own(
    service: RunningService, home: ServiceHome, workspaces: Path
) -> None:
    tokens = {name: home.new_agent(name) for name in ("owner", "other")}
    seen: dict[str, int] = {}
    for name, token in tokens.items():
        for kind in ("SHELL", "TERMINAL"):
            session = opened(service, token, kind)
            shown = ran(service, token, session, "id -u; whoami; echo $HOME; touch made && echo written")
            uid, *rest = shown.split()
            assert rest == ["agent", "/home/agent", "written"], shown
            assert seen.setdefault(name, int(uid)) == int(uid)
        workspace = workspaces / name
        assert (workspace.stat().st_uid, stat.S_IMODE(workspace.stat().st_mode)) == (seen[name], 0o700)
        assert (workspace / "made").stat().st_uid == seen[name]
    assert seen["owner"] != seen["other"]
    assert all(FIRST <= uid < FIRST + 100 for uid in seen.values())


@as_root
@needs_jail
def test_a_workspace_of_another_owner_is_refused(
    service: RunningService, home: ServiceHome, workspaces: Path
) -> None:
    token = home.new_agent("late")
    workspace = workspaces / "late"
    workspace.mkdir(0o700)
    status, reply = service.post("CreateSession", token, kind="SHELL")
    assert status != 200
    assert f"uid 0, and the agent's uid {FIRST // 1000}" in str(reply)
    assert workspace.stat().st_uid == 0
    workspace.rmdir()
    session = opened(service, token)
    assert ran(service, token, session, "touch made && echo written").strip() == "written"


@as_root
@pytest.mark.parametrize("mode", [*MODES[1:], "none"])
def test_a_session_without_a_jail_has_a_user_of_its_own_too(
    service: RunningService, home: ServiceHome, workspaces: Path, mode: str
) -> None:
    name = f"in-{mode}"
    token = home.new_agent(name, "--profile", mode)
    with directory_in("/etc") as etc:
        private = write_private(etc / "key")
        for kind in ("SHELL", "TERMINAL"):
            session = opened(service, token, kind)
            uid, *rest = ran(service, token, session, "id -u; echo $HOME; touch made && echo written").split()
            assert FIRST <= int(uid) < FIRST + 100
            assert rest == [str(workspaces / name), "written"]
            assert SECRET not in ran(service, token, session, f"cat {private}")


@as_root
@needs_jail
def test_rules_may_keep_the_user_of_the_server(
    service: RunningService, home: ServiceHome, workspaces: Path
) -> None:
    token = home.new_agent("trusted", "--profile", "trusted")
    session = opened(service, token)
    assert ran(service, token, session, "id -u; touch made").strip() == "0"
    assert (workspaces / "trusted" / "made").stat().st_uid == 0


# --- set-id bits -------------------------------------------------------------------------------------------------

#: Every call that takes a mode, with each bit: prints what succeeded.
SET_ID = """
import ctypes, errno, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
calls = {calls}
AT, CREATE, TMPFILE, WRITE = -100, 0o100, 0o20000000 | os.O_DIRECTORY, 1
path = lambda: os.fsencode(f"{{sys.argv[1]}}/made{{next(numbers)}}")
numbers = iter(range(10**6))
def call(name, *arguments):
    if name not in calls:
        return
    result = libc.syscall(calls[name], *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    number = ctypes.get_errno()
    expected = errno.ENOSYS if name == "openat2" else errno.EPERM
    if result >= 0 or number != expected:
        print("succeeded" if result >= 0 else errno.errorcode[number], name, arguments)
with open(f"{{sys.argv[1]}}/program", "wb") as file:
    file.write(b"x")
for bits in (0o4755, 0o2755, 0o6711):
    program = os.fsencode(f"{{sys.argv[1]}}/program")
    call("chmod", program, bits)
    call("fchmod", os.open(program, os.O_RDONLY), bits)
    call("fchmodat", AT, program, bits)
    call("fchmodat2", AT, program, bits, 0)
    call("open", path(), CREATE | WRITE, bits)
    call("open", os.fsencode(sys.argv[1]), TMPFILE | WRITE, bits)
    call("openat", AT, path(), CREATE | WRITE, bits)
    call("openat", AT, os.fsencode(sys.argv[1]), TMPFILE | WRITE, bits)
    call("openat2", AT, path(), struct.pack("=QQQ", CREATE | WRITE, bits, 0), 24)
    call("creat", path(), bits)
    call("mkdir", path(), bits)
    call("mkdirat", AT, path(), bits)
    call("mknod", path(), 0o100000 | bits, 0)
    call("mknodat", AT, path(), 0o100000 | bits, 0)
    call("mknodat", AT, path(), 0o010000 | bits, 0)
# Without them the calls work.
os.chmod(program, 0o755)
os.close(os.open(path(), os.O_CREAT | os.O_WRONLY, 0o755))
os.mkdir(path(), 0o1777)
os.mkfifo(path())
print("done")
"""


@as_root
@pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"{PYTHON} is not here: it makes the system calls")
@pytest.mark.skipif(os.uname().machine not in ARCHITECTURES, reason="no numbers of system calls for this machine")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, f"{UID}:{UID}"], ids=["root", "another user"])
async def test_no_confined_program_leaves_a_set_id_file(mode: Any, user: str | None) -> None:
    with directory_in("/tmp") as shared:
        shared.chmod(0o777)
        confinement = Confinement(mode=mode, writable=(str(shared),), network="none")
        program = SET_ID.format(calls=ARCHITECTURES[os.uname().machine].calls)
        async with holdfast.connect("inprocess") as box:
            process = await box.start(
                [PYTHON, "-", str(shared)], user=user, cwd=str(shared), confinement=confinement, stdin="open"
            )
            out, err = await process.communicate(program)
        assert (out.decode(), err.decode()) == ("done\n", "")
        found = [path for path in shared.rglob("*") if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
        assert found == []
        assert (shared / "program").stat().st_uid == (0 if user is None else UID)


# --- a service that is not root ----------------------------------------------------------------------------------


#: Executes a program as another user. `SHOWN` are directories of this Python and of the project in `CLOSED` ones,
#: which other users cannot enter: the program alone sees them, in a mount namespace.
BECOME = """
set -e
for path in $SHOWN; do
    mkdir -p "$HOME/shown$path"
    mount --bind "$path" "$HOME/shown$path"
done
for path in $CLOSED; do
    mount -t tmpfs -o mode=755 none "$path"
done
for path in $SHOWN; do
    mkdir -p "$path"
    mount --bind "$HOME/shown$path" "$path"
done
exec setpriv --reuid="$0" --regid="$0" --clear-groups -- "$@"
"""


def becoming(home: Path) -> tuple[str, ...]:
    shown: dict[str, str] = {}
    for path in (Path(sys.base_prefix), Path(__file__).parents[2]):
        closed = [each for each in path.parents if not each.stat().st_mode & stat.S_IXOTH]
        if closed:
            shown[str(path)] = str(closed[-1])
    names = (f"HOME={home}", f"SHOWN={' '.join(shown)}", f"CLOSED={' '.join(set(shown.values()))}")
    return ("env", *names, "unshare", "--mount", "--propagation", "private", "sh", "-c", BECOME, str(UID))


@as_root
@needs_program("setpriv", "unshare")
def test_a_service_of_another_user_runs_sessions_as_itself() -> None:
    """Confined as far as that user may."""
    with directory_in("/tmp") as home:
        os.chown(home, UID, UID)
        (home / "local").mkdir(0o700)
        os.chown(home / "local", UID, UID)
        service_home, become = ServiceHome(str(home)), becoming(home)
        try:
            with running_service(service_home, through=become) as service:
                for kind in ("SHELL", "TERMINAL"):
                    session = opened(service, service.operator, kind)
                    shown = ran(service, service.operator, session, "id -u; touch made && stat -c %u made")
                    assert shown.split() == [str(UID), str(UID)], shown
                    ran(service, service.operator, session, "chmod 4755 made")
                    mode = (home / "state/holdfast/workspaces/operator/made").stat().st_mode
                    assert not mode & stat.S_ISUID
        finally:
            command = [*become, sys.executable, "-m", "holdfast", "stop", "--force"]
            subprocess.run(command, env=service_home.environ, capture_output=True, check=False, timeout=60)
