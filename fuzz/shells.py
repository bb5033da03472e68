"""`python -m fuzz.shells --texts 200000`: command texts that the rules allow, given to real shells.

Texts come from a grammar of what evaluates arithmetic, reads text again or names a program. The rules deny
everything but builtins and wrappers. A program `canary`, which no rule allows, writes a file when it is executed;
variables, arguments, files and input that a text may use all hold texts that execute it. Every text that is allowed
runs in a subshell of a real bash or dash: a canary that was executed is a hit. Ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fuzz.shell_texts import TextMaker
from holdfast.launch.pidfd_signals import signal_child_group
from holdfast.service.policy.engine import decide_command
from holdfast.service.policy.profiles import CommandRule, Commands, Profile

ALLOWED: Final = (
    *(
        ":",
        "true",
        "false",
        "echo",
        "printf",
        "test",
        "[",
        "read",
        "declare",
        "typeset",
        "local",
        "export",
        "readonly",
    ),
    *("let", "unset", "set", "shift", "shopt", "eval", "command", "builtin", "exec", "trap", "wait", "mapfile"),
    *(
        "readarray",
        "getopts",
        "hash",
        "type",
        "alias",
        "enable",
        "source",
        ".",
        "return",
        "break",
        "continue",
        "exit",
    ),
    *("pwd", "umask", "times", "jobs", "coproc", "time", "f", "g", "compgen", "complete", "bind", "history", "fc"),
    *("[[", "caller", "dirs", "help", "ulimit", "cat"),
)
PROFILE: Final = Profile(name="fuzz", commands=Commands(default="deny", rules=(CommandRule("allow", ALLOWED),)))
SHELLS: Final = ("bash", "dash")
#: Programs beside `canary` that a text may find.
_WRAPPERS: Final = ("env", "nice", "xargs", "find", "cat", "bash", "sh", "dash", "setarch", "timeout")
#: State of a session before a text comes: each entry runs the canary if it is evaluated.
_STATE: Final = r"""
D=\$ E='a[$(canary)]' F='a[`canary`]' N=E V=-v M='-v a[$(canary)]' C=canary S='$(canary)' X='x=1 PATH=/' O=-p
i='a[$(canary)]' j='b[$(canary)]' L='(canary)' K='([$(canary)]=1)' P='PATH' Q="a[\$(canary)] "
set -- -v 'a[$(canary)]' 'x[`canary`]'
"""
#: Texts in one run of a shell: enough that its start does not count, few enough to repeat one by one after a hit.
_BATCH: Final = 250
#: A text takes a few milliseconds. One that waits for ever is ended after so long, and the next ones go on.
_STALL_SECONDS: Final = 5.0


class Ground:
    """A directory with the canary, in which texts run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hit = directory / "hit"
        self._hits = directory / "hits"
        self._begun = directory / "begun"
        self._work = directory / "work"
        self._bin = directory / "bin"
        self._bin.mkdir()
        self._input = directory / "input"
        self._input.write_text("a[$(canary)]\n" * 3 + "canary\n")
        canary = self._bin / "canary"
        canary.write_text(f"#!/bin/sh\necho x >>{shlex.quote(str(self._hit))}\n")
        canary.chmod(0o755)
        for name in _WRAPPERS:
            if found := shutil.which(name):
                (self._bin / name).symlink_to(found)

    def run(self, texts: Sequence[str], shell: str) -> list[int]:
        """The numbers of the texts that executed the canary."""
        hits: list[int] = []
        begin = 0
        while begin < len(texts):
            reached = self._run_from(begin, texts, shell)
            hits += map(int, self._hits.read_text().split())
            if self._hit.exists():
                hits.append(reached)
            begin = reached + 1
        return hits

    def hits(self, texts: Sequence[str], shell: str) -> list[str]:
        """Texts that execute the canary. Each of a batch with a hit runs alone: the canary may run late."""
        return [text for text in texts if self.run([text], shell)] if self.run(texts, shell) else []

    def _run_from(self, begin: int, texts: Sequence[str], shell: str) -> int:
        """Run texts from this one on; the number of the last one that was begun."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        # Names of files that a glob gives to what evaluates names.
        for name in ("a[$(canary)]", "-v", "canary"):
            (self._work / name).write_text("")
        self._hits.write_text("")
        self._hit.unlink(missing_ok=True)
        self._begun.write_text(f"{begin}\n")
        script = self._directory / "script"
        script.write_text(self._script(begin, texts))
        program = shutil.which(shell)
        if program is None:
            raise SystemExit(f"no {shell} to compare with")
        with subprocess.Popen(
            [program, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._work,
            env={"PATH": str(self._bin), "HOME": str(self._work)},
            start_new_session=True,
        ) as process:
            begun, ended = -1, False
            with open(os.pidfd_open(process.pid), "rb") as exit_of_shell:
                while not ended and begun != (begun := self._begun.stat().st_size):
                    ended = bool(select.select([exit_of_shell], [], [], _STALL_SECONDS)[0])
            # Background children of a text, and a text that does not end. The shell is reaped later, so that its
            # group is still its own.
            signal_child_group(process.pid, signal.SIGKILL)
        return len(texts) - 1 if ended else int(self._begun.read_text().split()[-1])

    def _script(self, begin: int, texts: Sequence[str]) -> str:
        hit, hits, begun, given = (
            shlex.quote(str(path)) for path in (self._hit, self._hits, self._begun, self._input)
        )
        lines = [_STATE]
        for number, text in enumerate(texts[begin:], begin):
            lines += [
                f"echo {number} >>{begun}",
                f"T={shlex.quote(text)}",
                f'( ulimit -t 1; ulimit -f 100; eval "$T" ) <{given} >/dev/null 2>&1',
                f"[ -e {hit} ] && {{ echo {number} >>{hits}; command -p rm -f {hit}; }}",
            ]
        return "\n".join([*lines, "wait", f"[ -e {hit} ] && echo {len(texts) - 1} >>{hits}", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.shells", description="Compare the rules with real shells."
    )
    parser.add_argument("--texts", type=int, default=200_000, help="to judge (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run")
    parser.add_argument("--hits", type=Path, default=Path("fuzz/crashes"), help="where hits go (%(default)s)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    sys.stderr.write(f"seed {seed}\n")
    maker = TextMaker(random.Random(seed))
    ran = dict.fromkeys(SHELLS, 0)
    waiting: dict[str, list[str]] = {shell: [] for shell in SHELLS}
    found: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-shells-") as directory:
        ground = Ground(Path(directory))
        for shell in SHELLS:
            if not ground.run(["canary"], shell):
                raise SystemExit(f"the canary is not seen in {shell}")
        for number in range(options.texts):
            text = maker.text()
            for shell in SHELLS:
                if decide_command(PROFILE, text, shell=shell, interactive=False).allowed:
                    waiting[shell].append(text)
                    ran[shell] += 1
                last = number == options.texts - 1
                if waiting[shell] and (last or len(waiting[shell]) >= _BATCH):
                    for hit in ground.hits(waiting[shell], shell):
                        found.append((shell, hit))
                        sys.stderr.write(f"hit in {shell}: {hit!r}\n")
                    waiting[shell] = []
            if number % 20_000 == 0:
                sys.stderr.write(f"{number:,} texts, {ran} ran, {len(found)} hits\n")
    if found:
        options.hits.mkdir(parents=True, exist_ok=True)
        kept = options.hits / f"shells-{seed}.txt"
        kept.write_text("".join(f"{shell}\t{text!r}\n" for shell, text in found))
        sys.stderr.write(f"hits are kept in {kept}\n")
    print(f"{options.texts:,} texts, {ran['bash']:,} run by bash, {ran['dash']:,} by dash, {len(found)} hits")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
