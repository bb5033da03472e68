"""From a `Confinement` to what the launcher is to do: the program to execute in place of it, and its orders.

Looks at the file system; opens and starts nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import CommandNotFound, CwdNotFound, InvalidParams, PermissionRefused
from holdfast.model import Confinement
from holdfast.runtime.confine import bubblewrap, landlock
from holdfast.runtime.confine.applying import PROXY_PORT
from holdfast.runtime.confine.paths import (
    PROGRAM_DIRECTORIES,
    SYSTEM,
    Visible,
    is_beneath,
    library_directories,
    program_files,
    visible_paths,
)
from holdfast.runtime.confine.seccomp import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, MACHINES, filter_program

#: Where bwrap is looked for: not in the PATH of the one to be confined.
_PROGRAM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_ENV: Final = "/usr/bin/env"
#: What keys, and the end of a terminal, send to those in its foreground.
_OF_THE_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP)
#: The first descriptor by which bwrap is given what was named; the launcher has a handful below it.
_FIRST_OPENED: Final = 64
#: Directories of which one is covered by the jail's scratch directories, for the jail alone.
_COVERED: Final = ("/mnt", "/media", "/boot", "/srv", "/home", "/var/spool", "/var/cache")
#: Of the machine's own directories, those in which no program and no library lies.
_WITHOUT_PROGRAMS: Final = ("/etc", "/opt")
_PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class Composed(NamedTuple):
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


def compose(
    confinement: Confinement,
    *,
    path: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    as_root: bool,
    own: Collection[str],
    tty: bool = False,
) -> Composed:
    """How to start this program confined. `as_root`: it will be; `own` are paths of the server; on a `tty`?"""
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
        return Composed(path, list(argv), variables, cwd, orders)
    visible = visible_paths(confinement, own)
    program = os.path.realpath(os.path.join(cwd, path))
    if not visible.shows(program):
        raise CommandNotFound(f"{argv[0]}: {program} is not among what the confinement lets be read")
    programs = None
    if confinement.programs is not None:
        programs = program_files(confinement.programs, {os.path.join(cwd, path), _ENV, "/bin/bash"})
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
        return Composed(path, list(argv), variables, cwd, orders)
    found = _in_jail(confinement, visible, os.path.join(cwd, path), argv, variables, cwd, as_root, orders, programs)
    return _deaf_to_keys(found) if tty and _env_resets_signals() else found


def _in_jail(
    confinement: Confinement,
    visible: Visible,
    path: str,
    argv: Sequence[str],
    environment: dict[str, str],
    cwd: str,
    as_root: bool,
    orders: dict[str, Any],
    programs: Mapping[str, str] | None,
) -> Composed:
    bwrap = find_bwrap()
    if bwrap is None:
        raise PermissionRefused("confinement: bubblewrap is not installed here: there is no program bwrap")
    if not (visible.shows(os.path.normpath(cwd)) or exists_in_jail(environment, cwd)):
        raise CwdNotFound(f"working directory {cwd!r}: not among what the confinement lets be read")
    opened = {}
    if binds_descriptors(bwrap):
        opened = {each: _FIRST_OPENED + index for index, each in enumerate(orders["named"])}
        orders["opened"] = list(opened.items())
    scratch = _without_execution(confinement, visible, environment, orders) if confinement.no_execution else {}
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
        programs=programs,
        scratch=scratch,
    )
    orders["options"] = b"".join(os.fsencode(word) + b"\0" for word in words)
    command = [path, *argv[1:]]
    if argv[0] not in (path, os.path.basename(path)):
        # This bwrap executes a program by no other name than its own.
        command = ["/bin/bash", "-c", 'exec -a "$0" "$@"', argv[0], *command]
    return Composed(bwrap, ["bwrap"], {"PATH": _PROGRAM_PATH}, "/", {**orders, "command": command})


def _without_execution(
    confinement: Confinement, visible: Visible, environment: Mapping[str, str], orders: dict[str, Any]
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
        made[home] = "mode=0700"
    scratch = {path: f"{covered}/{number}" for number, path in enumerate(made)}
    orders["no_execution"] = {
        "paths": [os.fsencode(path) for path in paths if not confinement.executes_in(path)],
        "covered": os.fsencode(covered),
        "scratch": [(os.fsencode(scratch[path]), f"{size},{mode}".encode()) for path, mode in made.items()],
    }
    return {path: place for path, place in scratch.items() if path not in given}


def _overlap(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)


def _deaf_to_keys(composed: Composed) -> Composed:
    """bwrap is in the foreground of the terminal with its program, and must not go when Ctrl-C is pressed.

    What it ignores, its program would ignore too; `env` gives it its signals back.
    """
    names = ",".join(number.name for number in _OF_THE_TERMINAL)
    command = [_ENV, f"--default-signal={names}", "--", *composed.orders["command"]]
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
    try:
        done = subprocess.run([bwrap, "--help"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"--ro-bind-fd" in done.stdout


def still_there(confinement: Confinement | None, cwd: str) -> str:
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
    if machine not in MACHINES:
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
