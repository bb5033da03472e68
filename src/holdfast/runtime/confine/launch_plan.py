"""The launch plan of a confined process: the program that the launcher executes, and its orders.

Reads the file system and the help texts of tools; opens and starts nothing else.
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

#: The search path of bwrap, instead of the PATH of the confined process.
_PROGRAM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_ENV: Final = "/usr/bin/env"
#: Signals that keys, and a hang-up, send to the foreground of a terminal.
_OF_THE_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP)
#: The first descriptor of the paths that bwrap gets; the launcher uses a handful below it.
_FIRST_OPENED: Final = 64
#: Variables by which the C library loads code or files. `setpriv` runs as root for an instant, so they are set
#: after it: the list of glibc for its own privileged programs, that of musl, and those of locales.
_READ_BY_LIBC: Final = (
    *("GCONV_PATH", "GETCONF_DIR", "GLIBC_*", "HOSTALIASES", "LANG", "LANGUAGE", "LC_*", "LD_*", "LOCALDOMAIN"),
    *("LOCPATH", "MALLOC_*", "MUSL_*", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR"),
)
#: Directories of which one is covered by the jail's scratch directories, in the jail alone.
_COVERED: Final = ("/mnt", "/media", "/boot", "/srv", "/home", "/var/spool", "/var/cache")
#: The machine's own directories without programs and libraries.
_WITHOUT_PROGRAMS: Final = ("/etc", "/opt")
_PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class LaunchPlan(NamedTuple):
    """The input of the launcher. Its orders are plain data, as `applying` reads them."""

    path: str
    argv: list[str]
    environment: dict[str, str]
    cwd: str
    orders: dict[str, Any]


def find_bwrap() -> str | None:
    return shutil.which("bwrap", path=_PROGRAM_PATH)


def default_cwd(confinement: Confinement | None) -> str | None:
    """The default working directory of a confined process: the server's own is not visible in the confinement."""
    if confinement is None or confinement.mode == "none":
        return None
    return next(iter(confinement.writable), "/")


def environment_for(confinement: Confinement, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a confined process: with its proxy, and a directory for temporary files."""
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
    """The plan to start a program confined. `as_root`: the server is root; `own` are the server's paths; `account`
    is the user to run it as, if that is another one; `tty`: it runs on a terminal."""
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
        # Without a proxy that listens in it, bwrap makes the network namespace.
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
        # Without a network namespace, only the filter would keep it from the network.
        orders["network"] = confinement.network != "host"
        return LaunchPlan(path, list(argv), variables, cwd, orders)
    visible = visible_paths(confinement, own)
    program = os.path.realpath(os.path.join(cwd, path))
    if not visible.shows(program):
        raise CommandNotFound(f"{argv[0]}: {program} is not readable in the confinement")
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
            own_paths = [path for path in (*given, *_WITHOUT_PROGRAMS) if confinement.executes_in(path)]
            executable = [*programs.values(), *library_directories(), *own_paths]
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
        raise CwdNotFound(f"working directory {cwd!r}: not readable in the confinement")
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
        # bwrap cannot set argv[0] of the program.
        command = ["/bin/bash", "-c", 'exec -a "$0" "$@"', argv[0], *command]
    return LaunchPlan(bwrap, ["bwrap"], {"PATH": _PROGRAM_PATH}, "/", {**orders, "command": command})


def _as_other_user(composed: LaunchPlan, other: Account, later: Mapping[str, str]) -> LaunchPlan:
    """Add a first program that drops root after bwrap has set up the jail, and then executes the program.

    A user namespace would not need root, but shows every file of the machine's users as that of the overflow uid,
    and some machines refuse it to users other than root.
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
    """/etc/passwd and /etc/group with this user and its group before the others that the jail may read, for
    `whoami` and `ls -l`."""
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
    """The command through `env`, and a shell if its name contains a `=`, which `env` would take for a variable."""
    named = ["/bin/sh", "-c", 'exec "$@"', "sh", *command] if "=" in command[0] else command
    return [_ENV, *words, *named]


def _without_execution(
    confinement: Confinement,
    visible: VisiblePaths,
    environment: Mapping[str, str],
    orders: dict[str, Any],
    home_mode: str,
) -> dict[str, str]:
    """Order mounts from which nothing can be executed; returns the scratch directories among them, by their paths
    in the jail. bwrap cannot make such mounts, and keeps the flags of existing ones."""
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
    return {path: made for path, made in scratch.items() if path not in given}


def _overlap(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)


def _ignoring_terminal_signals(composed: LaunchPlan) -> LaunchPlan:
    """Make bwrap ignore the signals of the terminal: it is in the foreground, and must survive Ctrl-C.

    Ignored signals are inherited; `env` resets them for the program.
    """
    names = ",".join(number.name for number in _OF_THE_TERMINAL)
    command = _through_env([f"--default-signal={names}", "--"], composed.orders["command"])
    ignored = tuple(int(number) for number in _OF_THE_TERMINAL)
    return composed._replace(orders={**composed.orders, "command": command, "ignored": ignored})


@functools.cache
def _env_resets_signals() -> bool:
    """Whether the machine's `env` can reset signals: that of GNU, since 8.31.

    Determined by its output: its exit status may be reaped by the server's orphan reaper.
    """
    return _output(_ENV, "--default-signal=INT", "echo", "yes") == b"yes\n"


@functools.cache
def binds_descriptors(bwrap: str) -> bool:
    """Whether this bwrap takes open directories: versions of 2024 and later. An older one follows a link that
    replaces a path while the jail is made."""
    return b"--ro-bind-fd" in _output(bwrap, "--help")


@functools.cache
def _changes_users(setpriv: str) -> bool:
    """Whether this setpriv can change the user: that of util-linux can, that of busybox cannot."""
    return b"--reuid" in _output(setpriv, "--help")


def _output(*argv: str) -> bytes:
    """The stdout of a tool; empty if it cannot be run."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return b""


def lasting_cwd(confinement: Confinement | None, cwd: str) -> str:
    """The working directory for the next program of a shell: a new jail does not have the /tmp of the old one."""
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
        raise PermissionRefused(f"confinement: the system call numbers of {machine} are unknown")
    return filter_program(machine, _families(confinement))


def _families(confinement: Confinement) -> tuple[int, ...]:
    """The socket families that are allowed: without those that no namespace separates (AF_VSOCK), or that are rare.

    Landlock does not restrict the paths of Unix sockets: with it, none can be made, or the sockets of the server
    and of the machine's container engine would be open. socketpair(2) is allowed.
    """
    network = (AF_INET, AF_INET6, AF_NETLINK)
    if confinement.mode == "landlock":
        return () if confinement.network == "none" else network
    return (AF_UNIX, *network) if confinement.unix_sockets else network
