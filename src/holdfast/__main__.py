"""The `holdfast` command: finds the verb and loads its module alone.

Plain verbs run inside sandboxes and start with the standard library. Quick verbs try `process.quick` first; typer
and rich are loaded only for the rest.
"""

from __future__ import annotations

import sys

from holdfast.cli import VERBS
from holdfast.launch import self_exec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the arguments name; returns the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        _open_standard_descriptors()
    self_exec.restore_environment()
    verb = argv[0] if argv else ""
    if verb in VERBS and VERBS[verb].plain:
        module = __import__(f"holdfast.cli.verbs.{VERBS[verb].module}", fromlist=["main"])
        if argv[1:2] in (["-h"], ["--help"]) and hasattr(module, "USAGE"):
            sys.stdout.write(module.USAGE)
            return 0
        return _run_plain(verb, lambda: int(module.main(argv[1:])))
    return _run_typed(verb, argv[1:])


def _run_plain(verb: str, work: Callable[[], int]) -> int:
    """Run a verb without typer; an error is one line on stderr and exit code 2."""
    try:
        return work()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Imported on failure only, because every call would pay for it.
        from holdfast.cli.support.text import fail
        from holdfast.errors import HoldfastError

        if not isinstance(error, OSError | HoldfastError):
            raise
        return fail(f"{verb}: {error}")


def _open_standard_descriptors() -> None:
    """Open closed descriptors among 0, 1 and 2: a later file or socket would get that number and our output."""
    import os

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _run_typed(verb: str, rest: list[str]) -> int:
    from holdfast import __version__

    if verb in ("-V", "--version"):
        sys.stdout.write(f"holdfast {__version__}\n")
        return 0
    if verb in ("", "-h", "--help", "help"):
        (sys.stdout if verb else sys.stderr).write(_help())
        return 0 if verb else 2
    if verb not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean `holdfast {near[0]}`? " if near else ""
        sys.stderr.write(f"holdfast: no verb {verb!r}; {hint}`holdfast --help` lists all verbs\n")
        return 2
    code = _quick(verb, rest) if VERBS[verb].quick else None
    if code is not None:
        return code
    try:
        from holdfast.cli.support.typed_verb import run
    except ModuleNotFoundError as error:
        if verb in ("status", "stop"):
            from holdfast.cli.verbs.inside import bare

            return _run_plain(verb, lambda: bare.main(verb, rest))
        sys.stderr.write(f"holdfast: the verb {verb!r} needs {error.name}, which is not installed here\n")
        return 2
    return run(verb, rest)


def _quick(verb: str, rest: list[str]) -> int | None:
    try:
        from holdfast.cli.verbs.process.quick import main
    except ModuleNotFoundError:
        return None  # it is not installed in sandboxes
    return main(verb, rest)


def _help() -> str:
    lines = [f"  {name:<11} {verb.help}\n" for name, verb in VERBS.items()]
    return (
        "usage: holdfast VERB [ARGUMENTS]\n\n"
        "Commands for sandboxes, and none of them is ever lost.\n\n"
        f"verbs:\n{''.join(lines)}\n"
        "`holdfast VERB --help` describes a verb; `holdfast --version` prints the version.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
