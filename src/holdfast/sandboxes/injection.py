"""Puts the server into a sandbox that has none: looks what is there, chooses what to bring, and streams it in.

Everything goes through commands that run inside, written for any POSIX shell and the few programs that busybox has;
a sandbox without a shell gets it by its engine's own copy. Knows sandboxes only as something that runs commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.sandboxes.bundle import Bundle, bundle

if TYPE_CHECKING:
    from holdfast.sandboxes.place import CommandPlace

#: The script's exit codes, out of the way of those that shells and engines use.
MISSING: Final = 97
NO_ROOM: Final = 98
NO_PLACE: Final = 99
#: Streaming it over a slow link takes its time.
PUT_IN_SECONDS: Final = 600.0
#: Where a sandbox without a shell gets it: its engine can write everywhere.
WITHOUT_SHELL: Final = "/var/tmp"

#: The directories that may take it, the first that is writable and may execute. `$1` is the name inside them, `$2`
#: the one that the caller prefers.
_PLACES: Final = """
n=$1; first=$2; shift 2
c=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
[ "$HOME" = / ] && c=
set -- $first $c /var/tmp /tmp /opt /run
"""

#: Is it there? Then this shell becomes the channel. A directory of another user's is not ours, whatever it holds.
_BOOT: Final = (
    _PLACES
    + """
for d; do
  p=$d/$n
  if [ -O "$p" ] && [ -x "$p/bin/holdfast" ]; then exec "$p/bin/holdfast" connect; fi
done
echo "no holdfast server is in this sandbox yet" >&2
exit 97
"""
)

#: Unpack stdin. It appears under its name complete or not at all; whoever else unpacks the same at this time is welcome.
_PUT_IN: Final = (
    """
umask 077
skip=$3; how=$4
"""
    + _PLACES.replace("shift 2", "shift 4")
    + """
for d; do
  case ":$skip:" in *":$d:"*) continue;; esac
  [ -d "$d" ] || mkdir -p "$d" 2>/dev/null || { echo "$d: cannot be made" >&2; continue; }
  t=$d/$n.$$
  mkdir "$t" 2>/dev/null || { echo "$d: cannot be written" >&2; continue; }
  echo '#!/bin/sh' > "$t/try" && chmod 700 "$t/try" && "$t/try" 2>/dev/null || {
    rm -rf "$t"; echo "$d: does not let programs be executed" >&2; continue; }
  rm -f "$t/try"
  tar -x$how -f - -C "$t" || { rm -rf "$t"; echo "$d" ; exit 98; }
  if [ -d "$d/$n" ]; then rm -rf "$t"; else mv "$t" "$d/$n"; rm -rf "$d/$n/$n.$$"; fi
  [ -x "$d/$n/bin/holdfast" ] && exit 0
  echo "$d: what was unpacked is not there" >&2
done
exit 99
"""
)


class Injection:
    """How the server gets into one sandbox. `directory` is where it is put, if the usual places will not do."""

    def __init__(self, *, directory: str | None = None, bundle_path: Path | None = None) -> None:
        self.directory = directory
        self._bundle_path = bundle_path
        self._bundle: Bundle | None = None
        #: Set once the sandbox turned out to have no shell: the server's command is then executed directly.
        self._without_shell = False

    async def _get_bundle(self) -> Bundle:
        if self._bundle is None:
            self._bundle = await bundle() if self._bundle_path is None else Bundle.at(self._bundle_path)
        return self._bundle

    async def connect_command(self) -> list[str]:
        """What to run inside to become the channel; its exit code is `MISSING` if nothing was put in yet."""
        chosen = await self._get_bundle()
        if self._without_shell:
            return [*chosen.command(f"{self.directory or WITHOUT_SHELL}/{chosen.name}"), "connect"]
        return ["sh", "-c", _BOOT, "holdfast", chosen.name, self.directory or ""]

    async def put_in(self, place: CommandPlace) -> None:
        """Bring it in, by whatever the sandbox has."""
        chosen = await self._get_bundle()
        look = await place.run(["sh", "-c", "for p in tar chmod mkdir rm mv gzip; do command -v $p; done; uname -m"])
        if look.exit_code in (126, 127) and not look.stdout:
            await self._copy(place, chosen, f"there is no shell ({look.said})")
            self._without_shell = True
            return
        found = {line.rpartition("/")[2] for line in look.stdout.split()}
        chosen.check_machine(found, place.address)
        if {"tar", "chmod", "mkdir", "rm", "mv"} <= found:
            await self._unpack(place, chosen)
        else:
            missing = sorted({"tar", "chmod", "mkdir", "rm", "mv"} - found)
            await self._copy(place, chosen, f"there is no {' and no '.join(missing)}")

    async def _unpack(self, place: CommandPlace, chosen: Bundle) -> None:
        skip: list[str] = []
        while True:
            script = ["sh", "-c", _PUT_IN, "holdfast", chosen.name, self.directory or "", ":".join(skip), "z"]
            done = await place.run(script, stdin=chosen.path, seconds=PUT_IN_SECONDS)
            if done.exit_code == 0:
                return
            full = done.stdout.strip()
            if done.exit_code == NO_ROOM and full and full not in skip:
                skip.append(full)  # another place may have more room
                continue
            if done.exit_code == NO_ROOM or skip:
                raise ResourceExhausted(
                    f"{place.address}: the server ({chosen.size // 1_000_000} MB packed) does not fit: {done.said}"
                )
            raise SandboxError(
                f"{place.address}: there is no place for the server: {done.said}; "
                "give it a directory that is writable and may execute (directory=...)"
            )

    async def _copy(self, place: CommandPlace, chosen: Bundle, why: str) -> None:
        directory = f"{self.directory or WITHOUT_SHELL}/{chosen.name}"
        if not await place.copy_in(chosen.path, directory):
            raise SandboxError(f"{place.address}: the server cannot be brought in: {why}")

