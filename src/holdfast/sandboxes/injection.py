"""Puts the server into a sandbox that has none: looks what is there, chooses what to bring, and streams it in.

Everything goes through commands that run inside, written for any POSIX shell and the few programs that busybox has;
a sandbox without a shell gets it by its engine's own copy. Knows sandboxes only as something that runs commands.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.sandboxes.bundle import Bundle, bundle, package, read_bundle
from holdfast.sandboxes.fitting import PROBE, fits, own_probe, read_probe
from holdfast.sandboxes.unpacking import unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sandboxes.outside import Outcome
    from holdfast.sandboxes.place import CommandPlace

#: What to bring: the bundle (True), one that was made elsewhere (its path), or our package alone (False), for a
#: sandbox whose own Python can run it.
What = bool | str | os.PathLike[str]

#: The scripts' exit codes, out of the way of those that shells and engines use.
MISSING: Final = 97
NO_ROOM: Final = 98
#: Streaming it over a slow link takes its time.
PUT_IN_SECONDS: Final = 600.0
#: Without these there is no unpacking inside.
_NEEDED: Final = {"tar", "chmod", "mkdir", "rm", "mv"}

_LOOK: Final = "for p in tar chmod mkdir rm mv; do command -v $p; done; uname -m; exit 0"

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
#: its name complete or not at all; whoever else unpacks the same at this time is welcome.
_PUT_IN: Final = (
    "umask 077; skip=$3\n"
    + _PLACES
    + """
for d; do
  [ -n "$d" ] || continue
  case ":$skip:" in *":$d:"*) continue;; esac
  [ -d "$d" ] || mkdir -p "$d" 2>/dev/null || { echo "$d: cannot be made" >&2; continue; }
  t=$d/$n.$$
  mkdir "$t" 2>/dev/null || { echo "$d: cannot be written" >&2; continue; }
  echo '#!/bin/sh' > "$t/try" && chmod 700 "$t/try" && "$t/try" 2>/dev/null || {
    rm -rf "$t"; echo "$d: does not let programs be executed" >&2; continue; }
  rm -f "$t/try"
  tar -x -z -o -f - -C "$t" || { rm -rf "$t"; echo "$d"; exit 98; }
  if [ -d "$d/$n" ]; then rm -rf "$t"; else mv "$t" "$d/$n"; rm -rf "$d/$n/$n.$$"; fi
  exit 0
done
exit 99
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
        """Bring it in, by whatever the sandbox has."""
        chosen = await self._choose(place)
        look = await place.run(["sh", "-c", _LOOK])
        if look.exit_code in (126, 127):
            self._without_shell = True
            there = await place.run([*chosen.command(f"{self._directory}/{chosen.name}"), "--version"])
            if there.exit_code != 0:
                await self._copy(place, chosen, f"there is no shell ({look.said})")
            return
        lines = look.stdout.split()
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
        probe = await place.run(["python3", "-I", "-c", PROBE])
        fit = fits(read_probe(probe.stdout), await asyncio.to_thread(own_probe))
        if fit == "bundle":
            raise SandboxError(
                f"{place.address}: has no Python that can run the server without the bundle: {probe.said}"
            )
        return await package(msgspec=fit == "package-with-msgspec")

    async def _unpack(self, place: CommandPlace, chosen: Bundle) -> None:
        full: list[str] = []
        while True:
            script = ["sh", "-c", _PUT_IN, "holdfast", chosen.name, self._directory, ":".join(full)]
            done = await place.run(script, stdin=chosen.path, seconds=PUT_IN_SECONDS)
            if done.exit_code == 0:
                return
            tried = done.stdout.strip()
            if done.exit_code == NO_ROOM and tried and tried not in full:
                full.append(tried)  # another place may have more room
            elif full:
                raise ResourceExhausted(
                    f"{place.address}: the server does not fit into {', '.join(full)}: {done.said}"
                )
            else:
                raise SandboxError(
                    f"{place.address}: there is no place for the server: {done.said}; "
                    "name a directory that is writable and may execute (directory=...)"
                )

    async def _copy(self, place: CommandPlace, chosen: Bundle, why: str) -> None:
        async with unpacked(chosen) as tree:
            copied = await place.copy_in(tree, self._directory or "/")
        if not copied:
            raise SandboxError(f"{place.address}: the server cannot be brought in: {why}")
