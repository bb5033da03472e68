"""Installs the server in a sandbox: chooses the bundle or the package, and streams it in.

Everything goes through commands that run inside, written for any POSIX shell and the few programs that busybox has;
a sandbox without a shell gets the tree by its engine's own copy. A sandbox is known only as a `CommandRunner`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from holdfast.errors import ConnectionLost, ResourceExhausted, SandboxError
from holdfast.launch import self_exec
from holdfast.sandboxes.host_command import Outcome
from holdfast.sandboxes.install.bundle import LAST_FILE, Bundle, bundle, package, plain_tar, read_bundle
from holdfast.sandboxes.install.requirements import PROBE, own_probe, read_probe, required
from holdfast.sandboxes.install.unpacking import unpacked

log = logging.getLogger(__name__)

#: The bundle that this machine makes (True), one that was made elsewhere (its path), or our package alone (False),
#: for a sandbox that has a suitable Python.
BundleChoice = bool | str | os.PathLike[str]

#: Exit code of the boot script if it finds no server; shells and engines do not use it.
MISSING: Final = 97
#: The line on stdout after which the boot script becomes the server's channel.
FOUND: Final = b"holdfast-found"
#: The limit for streaming the tree in, over a slow link.
INSTALL_SECONDS: Final = 600.0
#: Waits before a command that was cut off is run again.
RETRY_SECONDS: Final = (0.2, 1.0, 3.0)
#: The programs that unpacking inside needs.
_NEEDED: Final = ("tar", "chmod", "mkdir", "rm", "mv")

#: The line on stderr of a boot script that found no server: the machine, and which of `_NEEDED` exist inside.
_MISSING: Final = re.compile(r"^holdfast-missing: (\S+)(.*)$", re.MULTILINE)
#: The last line of a script that ran to its end. An engine's exit code proves neither that the script ran nor that
#: all of its input arrived: `kubectl exec` also exits with 0 when its connection was cut.
_VERDICT: Final = "holdfast-verdict: "
#: A directory that cannot be used, and why.
_TRIED: Final = "holdfast-tried: "

#: The line on stdout of a boot script that has prepared a directory and reads the tree from its stdin next: the
#: machine. The reply is one line, `plain` or `gzip` and the size of the tar, then the tar, and nothing after it.
TREE_REQUEST: Final = b"holdfast-needs: "
#: The size of a piece of that reply.
_PIECE_BYTES: Final = 256 * 1024

#: The directories that may hold the tree: `$1` is its name in them, `$2` the one that the caller prefers.
_DIRECTORIES: Final = """
n=$1; verb=$3; c=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
[ "${HOME:-/}" = / ] && c=
set -- "$2" "$c" /var/tmp /tmp /opt /run ""
"""

#: Find the tree; then this shell becomes the verb `$3`, with its options. A directory of another user is skipped,
#: because that user could have put any program there.
_FIND: Final = (
    _DIRECTORIES
    + f"""
run() {{ [ "$verb" != connect ] || echo {FOUND.decode()}; exec "$@"; }}
find_tree() {{
  for d; do
    p=$d/$n
    [ -O "$p" ] || continue
    if [ -x "$p/bin/holdfast" ]; then run "$p/bin/holdfast" $verb; fi
    if [ -f "$p/__main__.py" ]; then run python3 -I -X holdfast_package "$p" $verb; fi
  done
}}
find_tree "$@"
m=$(uname -m 2> /dev/null) || m=unknown
h=$m
for p in {" ".join(_NEEDED)}; do command -v $p > /dev/null 2>&1 && m="$m $p"; done
echo "holdfast-missing: $m" >&2
"""
)
_BOOT: Final = _FIND + f"exit {MISSING}\n"

#: Unpack a tar, by `fetch`, into the first directory that is writable and may execute, except those in `$skip`. The
#: last file of a tar without compression shows that all of it arrived. The tree appears under its name complete or
#: not at all, because another client may unpack the same tree meanwhile.
_PLACE: Final = """
umask 077; LC_ALL=C; export LC_ALL; t=
is_there() { [ -x "$d/$n/bin/holdfast" ] || [ -f "$d/$n/__main__.py" ]; }
trap '[ -z "$t" ] || rm -rf "$t"' 0
trap 'exit 1' 1 2 13 15
for d; do
  [ -n "$d" ] || continue
  case ":$skip:" in *":$d:"*) continue;; esac
  [ -d "$d" ] || w=$(mkdir -p "$d" 2>&1) || { tried "cannot be made" "$w"; continue; }
  if [ -e "$d/$n" ]; then
    [ -O "$d/$n" ] || { tried "holds the server of another user"; continue; }
    is_there && verdict installed "$d"
    rm -rf "$d/$n"
  fi
  t=$d/$n.$$
  w=$(mkdir "$t" 2>&1) || { t=; tried "cannot be written" "$w"; continue; }
  w=$({ echo '#!/bin/sh' > "$t/try" && chmod 700 "$t/try"; } 2>&1) || {
    rm -rf "$t"; t=; tried "has no room" "$w"; continue; }
  w=$("$t/try" 2>&1) || { rm -rf "$t"; t=; tried "does not let programs be executed" "$w"; continue; }
  rm -f "$t/try"
  w=$(fetch 2>&1 && { [ -n "$z" ] || [ -f "$t/{last}" ] || { echo cut off; false; }; }) || {
    rm -rf "$t"; t=
    case $w in
      *"o space left"*|*quota*|*"oo large"*) tried "has no room"; verdict full "$d";;
    esac
    w=${w#"${w%%[!
]*}"}
    verdict broken "tar: ${w%%
*}"
  }
  [ -e "$d/$n" ] || mv "$t" "$d/$n"
  rm -rf "$t" "$d/$n/$n.$$"; t=
  is_there && verdict installed "$d"
  verdict broken "$d/$n: is not complete"
done
verdict nowhere
""".replace("{last}", LAST_FILE)

#: Unpack stdin, except into the directories in `$3`; `$4` is the option for a compressed tar, or empty. All input
#: is read in every case: `kubectl exec` does not end while the command has left input unread.
_UNPACK: Final = (
    "skip=$3; z=$4\n"
    + _DIRECTORIES
    + """
drain() { cat > /dev/null 2>&1 || dd of=/dev/null bs=65536 2> /dev/null || while read -r x; do :; done; }
verdict() { drain; echo "holdfast-verdict: $*"; exit 0; }
tried() { echo "holdfast-tried: $d: $1${2:+ (${2##*: })}"; }
fetch() { tar -x $z -o -f - -C "$t"; }
"""
    + _PLACE
)

#: Find the tree, or request it from the client and unpack it, and become the verb either way: one command of the
#: engine in place of three. Exactly the tar is read, since GNU tar reads a pipe to its end and the pipe has the
#: messages of the verb next; all of it is read in every case, so that no part stays in the pipe. `dd` reads most,
#: because `head` of busybox reads single bytes. A subshell, because the verb must get neither the umask nor the
#: variables nor the descriptors of the installation. A script that fails leaves the reasons to `_UNPACK`.
_BOOT_OR_UNPACK: Final = (
    _FIND
    + f"""
for p in {" ".join(_NEEDED)} head cat; do command -v $p > /dev/null 2>&1 || exit {MISSING}; done
(
  exec 3>&1; skip=
  verdict() {{ [ "$1" = installed ]; exit; }}
  tried() {{ :; }}
  exactly() {{
    b=0
    dd if=/dev/null iflag=fullblock 2> /dev/null && b=$(($1 / 65536))
    [ $b = 0 ] || dd bs=65536 count=$b iflag=fullblock 2> /dev/null
    [ $(($1 - b * 65536)) = 0 ] || head -c $(($1 - b * 65536))
  }}
  fetch() {{
    echo "{TREE_REQUEST.decode()}$h" >&3
    read -r z size || return 1
    [ "$z" = gzip ] && z=-z || z=
    exactly "$size" | {{ tar -x $z -o -f - -C "$t"; c=$?; cat > /dev/null; [ $c = 0 ]; }}
  }}
"""
    + _PLACE
    + f""") && find_tree "$@"
exit {MISSING}
"""
)


class CommandRunner(Protocol):
    """The operations of a sandbox that installing needs; `CommandTarget` has them."""

    address: str

    @property
    def is_near(self) -> bool:
        """Whether bytes reach the sandbox faster than it can decompress them, as on this machine."""
        ...

    async def run(
        self, argv: Sequence[str], *, stdin: Path | bytes = b"", seconds: float | None = None
    ) -> Outcome: ...

    def lacks_program(self, exit_code: int, text: str) -> bool: ...

    async def copy_in(self, tree: Path, directory: str) -> bool: ...

    def cannot_copy(self, why: str) -> SandboxError: ...


class Installation:
    """The server's tree in one sandbox. `directory` is where it is unpacked, before the usual directories."""

    def __init__(self, *, directory: str | None = None, bundle: BundleChoice = True) -> None:
        self._directory = directory or ""
        self._choice = bundle
        self._bundle: Bundle | None = None
        self._tree: str | None = None
        #: False once the sandbox turned out to have no shell: the server's command is then executed directly.
        self.has_shell = True

    def copied_to(self, directory: str) -> None:
        """Note that the bundle was copied there when the sandbox was made, which needs no shell."""
        self._directory, self.has_shell = directory, False

    def copied_as(self, tree: str) -> None:
        """Note that `tree` is a bundle, of this version or another, that was there when the sandbox started."""
        self._tree, self.has_shell = tree, False

    async def command(self, runner: CommandRunner, *verb: str, requests: bool = False) -> list[str]:
        """Return the command inside that runs a verb; it exits with `MISSING` if no server is installed.

        With `requests`, its script requests a missing server by `TREE_REQUEST` before, and installs it.
        """
        if self._tree is not None:
            return [*self_exec.in_bundle(self._tree), "-m", "holdfast", *verb]
        chosen = await self._choose(runner)
        if not self.has_shell:
            return [*chosen.command(f"{self._directory}/{chosen.name}"), *verb]
        script = _BOOT_OR_UNPACK if requests else _BOOT
        return ["sh", "-c", script, "holdfast", chosen.name, self._directory, " ".join(verb)]

    async def run_verb(
        self, runner: CommandRunner, verb: Sequence[str], *, seconds: float | None = None
    ) -> Outcome | None:
        """Run a verb inside to its end, without installing anything; None if no server is installed."""
        done = await runner.run(await self.command(runner, *verb), seconds=seconds)
        if done.exit_code in (126, 127) and self.has_shell:
            self.has_shell = False
            done = await runner.run(await self.command(runner, *verb), seconds=seconds)
        return None if done.exit_code in (MISSING, 126, 127) else done

    async def install(self, runner: CommandRunner, boot_error: str) -> None:
        """Install the server after a boot command that found none and printed `boot_error`.

        `ConnectionLost` if the engine cut every attempt off.
        """
        chosen = await self._choose(runner)
        report = _MISSING.search(boot_error)
        if report is None:
            self.has_shell = False
            there = await runner.run([*chosen.command(f"{self._directory}/{chosen.name}"), "--version"])
            if there.exit_code != 0:
                reason = (boot_error.strip().splitlines() or ["no reason given"])[-1]
                await self._copy(runner, chosen, f"there is no shell ({reason})")
            return
        machine, found = report[1], report[2].split()
        _check_machine(runner, chosen, machine)
        lacking = sorted({*_NEEDED} - {*found})
        if lacking:
            await self._copy(runner, chosen, f"it has no {' and no '.join(lacking)}")
        else:
            await self._unpack(runner, chosen)

    async def reply(self, runner: CommandRunner, request: bytes) -> AsyncIterator[bytes]:
        """Yield the reply to the `TREE_REQUEST` of a boot script, in pieces."""
        chosen = await self._choose(runner)
        _check_machine(runner, chosen, request.removeprefix(TREE_REQUEST).decode(errors="replace"))
        archive, is_plain = await self._archive(runner, chosen)
        # A file of the local cache, which is in memory after the first sandbox.
        with open(archive, "rb") as file:  # noqa: ASYNC230
            yield f"{'plain' if is_plain else 'gzip'} {os.fstat(file.fileno()).st_size}\n".encode()
            while piece := file.read(_PIECE_BYTES):
                yield piece

    async def _archive(self, runner: CommandRunner, chosen: Bundle) -> tuple[Path, bool]:
        """Return the tar to send, and whether it is without compression."""
        if runner.is_near and isinstance(self._choice, bool):  # a bundle of a path is not in the cache
            return await asyncio.to_thread(plain_tar, chosen), True
        return chosen.path, False

    async def _choose(self, runner: CommandRunner) -> Bundle:
        if self._bundle is None:
            if self._choice is True:
                self._bundle = await bundle()
            elif self._choice is False:
                self._bundle = await self._choose_package(runner)
            else:
                self._bundle = await asyncio.to_thread(read_bundle, self._choice)
        return self._bundle

    async def _choose_package(self, runner: CommandRunner) -> Bundle:
        probe = await _run_whole(runner, ["python3", "-I", "-c", PROBE], lambda done: done.exit_code == 0)
        needed = required(read_probe(probe.stdout), await asyncio.to_thread(own_probe))
        if needed == "bundle":
            raise SandboxError(
                f"{runner.address}: has no Python that can run the server without the bundle: {probe.summary}"
            )
        return await package(msgspec=needed == "package-with-msgspec")

    async def _unpack(self, runner: CommandRunner, chosen: Bundle) -> None:
        tried: dict[str, str] = {}
        full: list[str] = []
        archive, is_plain = await self._archive(runner, chosen)
        option = "" if is_plain else "-z"
        for wait in (*RETRY_SECONDS, None):
            while True:
                script = ["sh", "-c", _UNPACK, "holdfast", chosen.name, self._directory, ":".join(full), option]
                done = await _run_whole(runner, script, _has_verdict, stdin=archive, seconds=INSTALL_SECONDS)
                if not _has_verdict(done):
                    raise ConnectionLost(
                        f"{runner.address}: the connection was cut while the server was being installed, "
                        f"{len(RETRY_SECONDS) + 1} times: {done.summary}"
                    )
                for line in done.stdout.splitlines():
                    if line.startswith(_TRIED):
                        directory, _, why = line.removeprefix(_TRIED).partition(": ")
                        tried[directory] = why
                verdict, _, about = done.stdout.splitlines()[-1].removeprefix(_VERDICT).partition(" ")
                if verdict != "full" or about in full:
                    break
                full.append(about)  # another directory may have more room
            if verdict == "installed":
                return
            if verdict != "broken":
                break
            # The archive did not arrive whole, though the script ran to its end.
            if wait is None:
                raise ConnectionLost(f"{runner.address}: the server did not arrive inside whole: {about}")
            await asyncio.sleep(wait)
        reasons = "; ".join(f"{directory}: {why}" for directory, why in tried.items())
        hint = "name a directory that is writable, may execute and has 17 MB of room (directory=...)"
        if small := [directory for directory, why in tried.items() if "no room" in why or "space left" in why]:
            raise ResourceExhausted(
                f"{runner.address}: the server does not fit into {', '.join(small)}: {reasons}; {hint}"
            )
        raise SandboxError(f"{runner.address}: no directory can hold the server: {reasons}; {hint}")

    async def _copy(self, runner: CommandRunner, chosen: Bundle, why: str) -> None:
        async with unpacked(chosen) as tree:
            copied = await runner.copy_in(tree, self._directory or "/")
        if not copied:
            raise runner.cannot_copy(why)


def _check_machine(runner: CommandRunner, chosen: Bundle, machine: str) -> None:
    if chosen.kind == "bundle" and machine not in ("unknown", chosen.machine):
        raise SandboxError(
            f"{runner.address}: is {machine}, and the bundle is for {chosen.machine}: "
            f"make one with `holdfast bundle -o FILE` on such a machine, and pass bundle=FILE"
        )


async def _run_whole(
    runner: CommandRunner,
    argv: list[str],
    is_whole: Callable[[Outcome], bool],
    *,
    stdin: Path | bytes = b"",
    seconds: float | None = None,
) -> Outcome:
    """Run a command, and again while it seems to have been cut off; return the last outcome."""
    for wait in (*RETRY_SECONDS, None):
        done = await runner.run(argv, stdin=stdin, seconds=seconds)
        if wait is None or is_whole(done) or runner.lacks_program(done.exit_code, done.error):
            break
        log.info("%s: a command was cut off and is run again: %s", runner.address, done.summary)
        await asyncio.sleep(wait)
    return done


def _has_verdict(done: Outcome) -> bool:
    """Whether a script ran to its end."""
    return (done.stdout.splitlines() or [""])[-1].startswith(_VERDICT)
