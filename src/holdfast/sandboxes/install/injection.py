"""Puts the server into a sandbox that has none: looks what is there, chooses what to bring, and streams it in.

Everything goes through commands that run inside, written for any POSIX shell and the few programs that busybox has;
a sandbox without a shell gets it by its engine's own copy. Knows sandboxes only as something that runs commands.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConnectionLost, ResourceExhausted, SandboxError
from holdfast.sandboxes.host_command import Outcome
from holdfast.sandboxes.install.bundle import Bundle, bundle, package, read_bundle
from holdfast.sandboxes.install.requirements import PROBE, fits, own_probe, read_probe
from holdfast.sandboxes.install.unpacking import unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sandboxes.host_command import Outcome
    from holdfast.sandboxes.sandbox_kind import CommandPlace

log = logging.getLogger(__name__)

#: What to bring: the bundle (True), one that was made elsewhere (its path), or our package alone (False), for a
#: sandbox whose own Python can run it.
What = bool | str | os.PathLike[str]

#: The boot script's exit code, out of the way of those that shells and engines use.
MISSING: Final = 97
#: Streaming it over a slow link takes its time.
PUT_IN_SECONDS: Final = 600.0
#: Waits before a command that was cut off is run again.
_AGAIN_SECONDS: Final = (0.2, 1.0, 3.0)
#: Without these there is no unpacking inside.
_NEEDED: Final = {"tar", "chmod", "mkdir", "rm", "mv"}

#: The last line of a script that ran to its end. An engine's exit code proves neither that the script ran nor that
#: all of its input arrived: `kubectl exec` also exits with 0 when its connection was cut.
_VERDICT: Final = "holdfast-verdict: "
#: A directory that will not do, and why.
_TRIED: Final = "holdfast-tried: "

_LOOK: Final = f"""
for p in tar chmod mkdir rm mv; do command -v $p; done; uname -m
echo "{_VERDICT}looked"
"""

#: The directories that may hold it: `$1` is its name in them, `$2` the one that the caller prefers.
_PLACES: Final = """
n=$1; verb=$3; c=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
[ "${HOME:-/}" = / ] && c=
set -- "$2" "$c" /var/tmp /tmp /opt /run ""
"""

#: Is it there? Then this shell becomes the verb `$3`, with its options, which mostly is the channel. A directory of
#: another user's is not ours, whatever it holds.
_BOOT: Final = (
    _PLACES
    + """
for d; do
  p=$d/$n
  [ -O "$p" ] || continue
  if [ -x "$p/bin/holdfast" ]; then exec "$p/bin/holdfast" $verb; fi
  if [ -f "$p/__main__.py" ]; then exec python3 -I -X holdfast_package "$p" $verb; fi
done
echo "no server was put into this sandbox yet" >&2
exit 97
"""
)

#: Unpack stdin into the first directory that is writable and may execute, except those in `$3`. It appears under
#: its name complete or not at all; another client may unpack the same at this time. All of stdin is read in every
#: case: `kubectl exec` does not end while the command has left input unread.
_PUT_IN: Final = (
    "umask 077; skip=$3\n"
    + _PLACES
    + """
LC_ALL=C; export LC_ALL; t=
drain() { cat > /dev/null 2>&1 || dd of=/dev/null bs=65536 2> /dev/null || while read -r x; do :; done; }
verdict() { drain; echo "holdfast-verdict: $*"; exit 0; }
tried() { echo "holdfast-tried: $d: $1${2:+ (${2##*: })}"; }
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
  w=$(tar -x -z -o -f - -C "$t" 2>&1) || {
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
"""
)


class Injection:
    """How the server gets into one sandbox. `directory` is where it is put, if the usual places will not do."""

    def __init__(self, *, directory: str | None = None, bundle: What = True) -> None:
        self._directory = directory or ""
        self._what = bundle
        self._chosen: Bundle | None = None
        #: Set once the sandbox turned out to have no shell: the server's command is then executed directly.
        self._without_shell = False

    def is_in(self, directory: str, *, without_shell: bool) -> None:
        """Whoever made the sandbox has put the bundle there already."""
        self._directory, self._without_shell = directory, without_shell

    async def connect_command(self, place: CommandPlace) -> list[str]:
        """What to run inside to become the channel; its exit code is `MISSING` if nothing was put in yet."""
        return await self._command(place, "connect")

    async def exec_command(self, place: CommandPlace) -> list[str]:
        """The same for one request on stdin and its reply on stdout."""
        return await self._command(place, "exec")

    async def run_verb(
        self, place: CommandPlace, verb: Sequence[str], *, seconds: float | None = None
    ) -> Outcome | None:
        """Run a verb inside to its end, without putting anything in; None if nothing was put in yet."""
        done = await place.run(await self._command(place, *verb), seconds=seconds)
        if done.exit_code in (126, 127) and not self._without_shell:
            self._without_shell = True
            done = await place.run(await self._command(place, *verb), seconds=seconds)
        return None if done.exit_code in (MISSING, 126, 127) else done

    async def _command(self, place: CommandPlace, *verb: str) -> list[str]:
        chosen = await self._choose(place)
        if self._without_shell:
            return [*chosen.command(f"{self._directory}/{chosen.name}"), *verb]
        return ["sh", "-c", _BOOT, "holdfast", chosen.name, self._directory, " ".join(verb)]

    async def put_in(self, place: CommandPlace) -> None:
        """Bring it in, by whatever the sandbox has. `ConnectionLost` if the engine cut every attempt off."""
        chosen = await self._choose(place)
        look = await _run_script(place, ["sh", "-c", _LOOK])
        if place.lacks_program(look.exit_code, look.words):
            self._without_shell = True
            there = await place.run([*chosen.command(f"{self._directory}/{chosen.name}"), "--version"])
            if there.exit_code != 0:
                await self._copy(place, chosen, f"there is no shell ({look.said})")
            return
        lines = look.stdout.partition(_VERDICT)[0].split()
        found = {line.rpartition("/")[2] for line in lines}
        machine = lines[-1] if lines and "/" not in lines[-1] and lines[-1] not in _NEEDED else None
        if chosen.kind == "bundle" and machine is not None and machine != chosen.machine:
            raise SandboxError(
                f"{place.address}: is {machine}, and the bundle is for {chosen.machine}: "
                f"make one with `holdfast bundle -o FILE` on such a machine, and pass bundle=FILE"
            )
        if found >= _NEEDED:
            await self._unpack(place, chosen)
        else:
            await self._copy(place, chosen, f"it has no {' and no '.join(sorted(_NEEDED - found))}")

    async def _choose(self, place: CommandPlace) -> Bundle:
        if self._chosen is None:
            if self._what is True:
                self._chosen = await bundle()
            elif self._what is False:
                self._chosen = await self._choose_package(place)
            else:
                self._chosen = await asyncio.to_thread(read_bundle, self._what)
        return self._chosen

    async def _choose_package(self, place: CommandPlace) -> Bundle:
        probe = await _run_whole(place, ["python3", "-I", "-c", PROBE], lambda done: done.exit_code == 0)
        fit = fits(read_probe(probe.stdout), await asyncio.to_thread(own_probe))
        if fit == "bundle":
            raise SandboxError(
                f"{place.address}: has no Python that can run the server without the bundle: {probe.said}"
            )
        return await package(msgspec=fit == "package-with-msgspec")

    async def _unpack(self, place: CommandPlace, chosen: Bundle) -> None:
        tried: dict[str, str] = {}
        full: list[str] = []
        for wait in (*_AGAIN_SECONDS, None):
            while True:
                script = ["sh", "-c", _PUT_IN, "holdfast", chosen.name, self._directory, ":".join(full)]
                done = await _run_script(place, script, stdin=chosen.path, seconds=PUT_IN_SECONDS)
                for line in done.stdout.splitlines():
                    if line.startswith(_TRIED):
                        directory, _, why = line.removeprefix(_TRIED).partition(": ")
                        tried[directory] = why
                verdict, _, about = _verdict(done.stdout).partition(" ")
                if verdict != "full" or about in full:
                    break
                full.append(about)  # another place may have more room
            if verdict == "installed":
                return
            if verdict != "broken":
                break
            # The archive did not arrive whole, though the script did run to its end.
            if wait is None:
                raise ConnectionLost(f"{place.address}: the server did not arrive inside whole: {about}")
            await asyncio.sleep(wait)
        reasons = "; ".join(f"{directory}: {why}" for directory, why in tried.items())
        hint = "name a directory that is writable, may execute and has 17 MB of room (directory=...)"
        if small := [directory for directory, why in tried.items() if "no room" in why or "space left" in why]:
            raise ResourceExhausted(
                f"{place.address}: the server does not fit into {', '.join(small)}: {reasons}; {hint}"
            )
        raise SandboxError(f"{place.address}: there is no place for the server: {reasons}; {hint}")

    async def _copy(self, place: CommandPlace, chosen: Bundle, why: str) -> None:
        async with unpacked(chosen) as tree:
            copied = await place.copy_in(tree, self._directory or "/")
        if not copied:
            raise place.cannot_copy(why)


async def _run_script(
    place: CommandPlace, argv: list[str], *, stdin: Path | bytes = b"", seconds: float | None = None
) -> Outcome:
    """Run a script that ends with a verdict; `ConnectionLost` if it was cut off each time. Without a shell, its
    failure."""
    done = await _run_whole(place, argv, lambda done: bool(_verdict(done.stdout)), stdin=stdin, seconds=seconds)
    if not _verdict(done.stdout) and not place.lacks_program(done.exit_code, done.words):
        raise ConnectionLost(
            f"{place.address}: the connection was cut while the server was being put in, "
            f"{len(_AGAIN_SECONDS) + 1} times: {done.said}"
        )
    return done


async def _run_whole(
    place: CommandPlace,
    argv: list[str],
    is_whole: Callable[[Outcome], bool],
    *,
    stdin: Path | bytes = b"",
    seconds: float | None = None,
) -> Outcome:
    """Run a command, and again while it seems to have been cut off; the last outcome."""
    for wait in (*_AGAIN_SECONDS, None):
        done = await place.run(argv, stdin=stdin, seconds=seconds)
        if wait is None or is_whole(done) or place.lacks_program(done.exit_code, done.words):
            break
        log.info("%s: a command was cut off and is run again: %s", place.address, done.said)
        await asyncio.sleep(wait)
    return done


def _verdict(stdout: str) -> str:
    """The verdict of a script that ran to its end, else an empty string."""
    last = (stdout.splitlines() or [""])[-1]
    return last.removeprefix(_VERDICT) if last.startswith(_VERDICT) else ""
