"""From a `Confinement` to what the launcher is to do: the program to execute in place of it, and its orders.

Looks at the file system; opens and starts nothing.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import CommandNotFound, CwdNotFound, InvalidParams, PermissionRefused
from holdfast.runtime.confine import bubblewrap, landlock
from holdfast.runtime.confine.applying import PROXY_PORT
from holdfast.runtime.confine.paths import (
    PROGRAM_DIRECTORIES,
    SYSTEM,
    VisiblePaths,
    is_beneath,
    library_directories,
    program_files,
    visible_paths,
)
from holdfast.runtime.confine.seccomp import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, ARCHITECTURES, filter_program
from holdfast.runtime.process.environment import Account
from holdfast.types import Confinement

#: Where bwrap is looked for: not in the PATH of the one to be confined.
_PROGRAM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_ENV: Final = "/usr/bin/env"
#: What keys, and the end of a terminal, send to those in its foreground.
_OF_THE_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP)
#: The first descriptor by which bwrap is given what was named; the launcher has a handful below it.
_FIRST_OPENED: Final = 64
#: Variables by which the C library runs or reads something. `setpriv` runs as root for an instant, so these are set
#: behind it: the list of glibc for its own privileged programs, that of musl, and those of locales.
_READ_BY_LIBC: Final = (
    *("GCONV_PATH", "GETCONF_DIR", "GLIBC_*", "HOSTALIASES", "LANG", "LANGUAGE", "LC_*", "LD_*", "LOCALDOMAIN"),
    *("LOCPATH", "MALLOC_*", "MUSL_*", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR"),
)
#: Directories of which one is covered by the jail's scratch directories, for the jail alone.
_COVERED: Final = ("/mnt", "/media", "/boot", "/srv", "/home", "/var/spool", "/var/cache")
#: Of the machine's own directories, those in which no program and no library lies.
_WITHOUT_PROGRAMS: Final = ("/etc", "/opt")
_PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class LaunchPlan(NamedTuple):
    """What the launcher gets. Its orders are plain data, as `applying` reads them."""

    path: str
    argv: list[str]
    environment: dict[str, str]
    cwd: str
    orders: dict[str, Any]


def find_bwrap() -> str | None:
    return shutil.which("bwrap", path=_PROGRAM_PATH)


def default_cwd(confinement: Confinement | None) -> str | None:
    """Where a confined process starts if nobody says where: the server's own directory would not be there."""
    if confinement is None or confinement.mode == "none":
        return None
    return next(iter(confinement.writable), "/")


def environment_for(confinement: Confinement, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a confined process: where its proxy is, and a place for its temporary files."""
    variables = dict(environment)
    if confinement.network == "proxy":
        variables.update(dict.fromkeys(_PROXY_VARIABLES, f"http://127.0.0.1:{PROXY_PORT}"))
    given = variables.get("TMPDIR", "/tmp")
    if not any(is_beneath(given, path) for path in confinement.writable):
        if confinement.mode == "bubblewrap":
            variables.pop("TMPDIR", None)
        elif confinement.mode == "landlock" and confinement.writable:
            variables["TMPDIR"] = confinement.writable[0]
    return variables


def plan_launch(
    confinement: Confinement,
    *,
    path: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    as_root: bool,
    own: Collection[str],
    account: Account | None = None,
    tty: bool = False,
) -> LaunchPlan:
    """How to start this program confined. `as_root`: the server is root; `own` are its paths; `account` is
    the user to run it as, if that is another one; on a `tty`?"""
    if confinement.network == "proxy" and not confinement.proxy:
        raise InvalidParams("confinement: network `proxy` needs the path of the proxy's socket, in `proxy`")
    if not (confinement.unix_sockets or confinement.seccomp):
        raise InvalidParams("confinement: without `unixSockets` it needs `seccomp`")
    orders: dict[str, Any] = {
        "mode": confinement.mode,
        "drop_capabilities": confinement.mode == "landlock",
        "rules": None,
        "no_tcp": confinement.network == "none",
        "filter": _filter(confinement) if confinement.seccomp else None,
        # bwrap makes its own where nobody has to listen in it.
        "network": confinement.network == "proxy",
        "proxy": confinement.proxy if confinement.network == "proxy" else None,
        "options": b"",
        "ignored": (),
        "named": [],
        "opened": [],
        "written": [],
        "no_execution": None,
    }
    if confinement.no_execution and confinement.mode != "bubblewrap":
        raise InvalidParams("confinement: `noExecution` needs the mode `bubblewrap`")
    if confinement.programs is not None and confinement.mode == "none":
        raise InvalidParams("confinement: `programs` need a mode")
    variables = dict(environment)
    if confinement.mode == "none":
        # Without one of its own, the filter alone would have to keep it from the network.
        orders["network"] = confinement.network != "host"
        return LaunchPlan(path, list(argv), variables, cwd, orders)
    visible = visible_paths(confinement, own)
    program = os.path.realpath(os.path.join(cwd, path))
    if not visible.shows(program):
        raise CommandNotFound(f"{argv[0]}: {program} is not among what the confinement lets be read")
    other = account if as_root and account is not None and account.uid != 0 else None
    programs = None
    if confinement.programs is not None:
        always = {os.path.join(cwd, path), _ENV, "/bin/bash"} | ({_setpriv()} if other is not None else set())
        programs = program_files(confinement.programs, always)
    orders["named"] = sorted({os.path.normpath(each) for each in (*confinement.writable, *confinement.readable)})
    if confinement.mode == "landlock":
        executable = None
        if programs is not None:
            given = [path for path in (*visible.writable, *visible.readable) if path not in SYSTEM]
            own_places = [path for path in (*given, *_WITHOUT_PROGRAMS) if confinement.executes_in(path)]
            executable = [*programs.values(), *library_directories(), *own_places]
        orders["rules"] = landlock.rules(visible, hide_processes=confinement.hide_processes, executable=executable)
        if orders["filter"] is None and confinement.network == "none":
            raise InvalidParams("confinement: with `landlock`, network `none` needs `seccomp`")
        return LaunchPlan(path, list(argv), variables, cwd, orders)
    later = {} if other is None else {name: variables.pop(name) for name in list(variables) if _libc_reads(name)}
    found = _in_jail(
        confinement, visible, os.path.join(cwd, path), argv, variables, cwd, as_root, other, orders, programs
    )
    if tty and _env_resets_signals():
        found = _ignoring_terminal_signals(found)
    return found if other is None else _as_other_user(found, other, later)


def _in_jail(
    confinement: Confinement,
    visible: VisiblePaths,
    path: str,
    argv: Sequence[str],
    environment: dict[str, str],
    cwd: str,
    as_root: bool,
    other: Account | None,
    orders: dict[str, Any],
    programs: Mapping[str, str] | None,
) -> LaunchPlan:
    bwrap = find_bwrap()
    if bwrap is None:
        raise PermissionRefused("confinement: bubblewrap is not installed here: there is no program bwrap")
    if not (visible.shows(os.path.normpath(cwd)) or exists_in_jail(environment, cwd)):
        raise CwdNotFound(f"working directory {cwd!r}: not among what the confinement lets be read")
    opened = {}
    if binds_descriptors(bwrap):
        opened = {each: _FIRST_OPENED + index for index, each in enumerate(orders["named"])}
        orders["opened"] = list(opened.items())
    users = {} if other is None or other.listed else _user_database(other.within(confinement), visible)
    numbers = range(_FIRST_OPENED + len(opened), _FIRST_OPENED + len(opened) + len(users))
    orders["written"] = list(zip(users.values(), numbers, strict=True))
    scratch = {}
    if confinement.no_execution:
        home_mode = bubblewrap.home_mode(other is not None)
        scratch = _without_execution(confinement, visible, environment, orders, home_mode)
    words = bubblewrap.options(
        confinement,
        visible,
        environment=environment,
        cwd=cwd,
        as_root=as_root,
        own_network=bool(orders["network"]),
        directories=frozenset(
            path for path in (*visible.hidden, *bubblewrap.PROC_HIDDEN, *PROGRAM_DIRECTORIES) if os.path.isdir(path)
        ),
        proc=[path for path in (*bubblewrap.PROC_READ_ONLY, *bubblewrap.PROC_HIDDEN) if os.path.exists(path)],
        opened=opened,
        changes_user=other is not None,
        written=dict(zip(users, numbers, strict=True)),
        programs=programs,
        scratch=scratch,
    )
    orders["options"] = b"".join(os.fsencode(word) + b"\0" for word in words)
    command = [path, *argv[1:]]
    if argv[0] not in (path, os.path.basename(path)):
        # This bwrap executes a program by no other name than its own.
        command = ["/bin/bash", "-c", 'exec -a "$0" "$@"', argv[0], *command]
    return LaunchPlan(bwrap, ["bwrap"], {"PATH": _PROGRAM_PATH}, "/", {**orders, "command": command})


def _as_other_user(composed: LaunchPlan, other: Account, later: Mapping[str, str]) -> LaunchPlan:
    """bwrap sets the jail up as root, and its first program gives that up: then the program, as the other user.

    A user namespace would do without root, but shows every file of the machine's users as nobody's, and some
    machines refuse one to users other than root.
    """
    groups = sorted({*other.groups} - {other.gid})
    drop = [
        *(_setpriv(), f"--reuid={other.uid}", f"--regid={other.gid}"),
        f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups",
        *("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"),
    ]
    command = composed.orders["command"]
    if later:
        command = _through_env([f"{name}={value}" for name, value in later.items()], command)
    return composed._replace(orders={**composed.orders, "command": [*drop, *command]})


def _setpriv() -> str:
    found = shutil.which("setpriv", path=_PROGRAM_PATH)
    if found is None or not _changes_users(found):
        raise PermissionRefused("confinement: as another user it needs setpriv of util-linux, which is not here")
    return found


def _libc_reads(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _READ_BY_LIBC)


def _user_database(account: Account, visible: VisiblePaths) -> dict[str, bytes]:
    """/etc/passwd and /etc/group with this user and its group in them, before the others that the jail may see:
    `whoami` and `ls -l` know it by its name."""
    user = f"{account.name}:x:{account.uid}:{account.gid}::{account.home}:{account.shell}\n"
    group = f"{account.name}:x:{account.gid}:\n"
    return {
        path: line.encode() + (_read(path) if visible.shows(path) else b"")
        for path, line in (("/etc/passwd", user), ("/etc/group", group))
        if path not in (*visible.readable, *visible.writable)
    }


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _through_env(words: Sequence[str], command: Sequence[str]) -> list[str]:
    """`env` takes a program whose name holds a `=` for one more variable; a shell in between does not."""
    named = ["/bin/sh", "-c", 'exec "$@"', "sh", *command] if "=" in command[0] else command
    return [_ENV, *words, *named]


def _without_execution(
    confinement: Confinement,
    visible: VisiblePaths,
    environment: Mapping[str, str],
    orders: dict[str, Any],
    home_mode: str,
) -> dict[str, str]:
    """Order mounts from which nothing can be executed; the scratch directories among them, by their paths in the
    jail. bwrap cannot make such mounts, and keeps the flags of those that it finds."""
    given = (*visible.readable, *visible.writable)
    covered = next(
        (each for each in _COVERED if os.path.isdir(each) and not any(_overlap(each, path) for path in given)), None
    )
    if covered is None:
        raise PermissionRefused(f"confinement: `noExecution` needs one of {', '.join(_COVERED)} to be free")
    paths = [path for path in given if path not in SYSTEM or path in _WITHOUT_PROGRAMS]
    size = f"size={confinement.scratch_bytes}"
    made = {"/tmp": "mode=1777", "/dev/shm": "mode=1777"}
    if (home := bubblewrap.scratch_home(visible, environment)) is not None:
        made[home] = f"mode={home_mode}"
    scratch = {path: f"{covered}/{number}" for number, path in enumerate(made)}
    orders["no_execution"] = {
        "paths": [os.fsencode(path) for path in paths if not confinement.executes_in(path)],
        "covered": os.fsencode(covered),
        "scratch": [(os.fsencode(scratch[path]), f"{size},{mode}".encode()) for path, mode in made.items()],
    }
    return {path: place for path, place in scratch.items() if path not in given}


def _overlap(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)


def _ignoring_terminal_signals(composed: LaunchPlan) -> LaunchPlan:
    """bwrap is in the foreground of the terminal with its program, and must not go when Ctrl-C is pressed.

    What it ignores, its program would ignore too; `env` gives it its signals back.
    """
    names = ",".join(number.name for number in _OF_THE_TERMINAL)
    command = _through_env([f"--default-signal={names}", "--"], composed.orders["command"])
    ignored = tuple(int(number) for number in _OF_THE_TERMINAL)
    return composed._replace(orders={**composed.orders, "command": command, "ignored": ignored})


@functools.cache
def _env_resets_signals() -> bool:
    """Whether the machine's `env` can: that of GNU, since 8.31. By what it prints: its status a server may take."""
    try:
        done = subprocess.run(
            [_ENV, "--default-signal=INT", "echo", "yes"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout == b"yes\n"


@functools.cache
def binds_descriptors(bwrap: str) -> bool:
    """Whether this bwrap can be given a directory that is open: those of 2024 and later. To an older one, a path
    that is replaced by a link while the jail is made leads wherever the link does."""
    return _helps_with(bwrap, b"--ro-bind-fd")


@functools.cache
def _changes_users(setpriv: str) -> bool:
    """That of util-linux can; that of busybox cannot."""
    return _helps_with(setpriv, b"--reuid")


def _helps_with(program: str, option: bytes) -> bool:
    """Whether the program's `--help` lists this option."""
    try:
        done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return option in done.stdout


def lasting_cwd(confinement: Confinement | None, cwd: str) -> str:
    """A working directory for the next program of a shell: a new jail has nothing of the /tmp of the old one."""
    if confinement is None or confinement.mode != "bubblewrap":
        return cwd if os.path.isdir(cwd) else "/"
    given = (*confinement.writable, *confinement.readable, *SYSTEM)
    lasts = os.path.isdir(cwd) and any(is_beneath(cwd, path) for path in given)
    return cwd if lasts or cwd == "/tmp" else "/"


def exists_in_jail(environment: Mapping[str, str], cwd: str) -> bool:
    """Whether every jail has this directory."""
    return os.path.normpath(cwd) in ("/", "/tmp", "/dev/shm", os.path.normpath(environment.get("HOME", "/")))


def _filter(confinement: Confinement) -> bytes:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise PermissionRefused(f"confinement: the numbers of system calls on {machine} are not known here")
    return filter_program(machine, _families(confinement))


def _families(confinement: Confinement) -> tuple[int, ...]:
    """Sockets that may be made. Not those that no namespace separates (AF_VSOCK), nor what is seldom used.

    Landlock does not look at the paths of Unix sockets: with it, none can be made, or the server's own, and the
    engine's of the machine, would be open. A pair (socketpair) can.
    """
    network = (AF_INET, AF_INET6, AF_NETLINK)
    if confinement.mode == "landlock":
        return () if confinement.network == "none" else network
    return (AF_UNIX, *network) if confinement.unix_sockets else network
