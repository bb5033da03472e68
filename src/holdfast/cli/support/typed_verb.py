"""Runs a verb by typer: its module's `command` function, or one of its `SUB_VERBS`.

Only that module is imported. Errors become one line on stderr and an exit code; a traceback is a bug.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar

import typer

from holdfast.cli import VERBS
from holdfast.cli.support.exit_codes import BROKEN_PIPE, FAILED, INTERRUPTED, OURS, USAGE, describe, exit_code_of
from holdfast.cli.support.near_ids import suggestion
from holdfast.cli.support.text import complain, discard_stdout
from holdfast.errors import HoldfastError, InvalidParams

T = TypeVar("T")

#: Verbs that exit with the command's code: errors of Holdfast get a code that commands seldom use.
_EXIT_AS_THE_COMMAND: Final = (
    "run",
    "wait",
    "attach",
    "bridge",
    "shell",
    "shell run",
    "session run",
    "session attach",
)

#: typer contains a copy of click from 0.20 on and imports click before, so the class is found by inheritance.
_UsageError: Final = typer.BadParameter.__mro__[1]


def run(verb: str, arguments: list[str]) -> int:
    """Parse the arguments, run the verb, return the exit code."""
    module = importlib.import_module(f"holdfast.cli.verbs.{VERBS[verb].module}")
    command: Callable[..., int] = module.command
    sub_verbs: dict[str, Callable[..., int]] = getattr(module, "SUB_VERBS", {})
    epilog = "\n\n".join(f"holdfast {verb} {name}: {_lines(each)[0]}" for name, each in sub_verbs.items())
    if sub_verbs and arguments and not arguments[0].startswith("-"):
        sub_verb, *arguments = arguments
        if sub_verb not in sub_verbs:
            hint = suggestion((sub_verb,), sub_verbs) or f"; sub-verbs: {', '.join(sub_verbs)}"
            complain(f"{verb}: no sub-verb {sub_verb!r}{hint}")
            return USAGE
        command, epilog = sub_verbs[sub_verb], ""
        verb = f"{verb} {sub_verb}"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # Options after the command's name belong to the command: `holdfast run ls -l`.
    settings = {"allow_interspersed_args": verb not in ("run", "bridge"), "help_option_names": ["-h", "--help"]}
    text = "\n\n".join(_lines(command))
    app.command(help=text, epilog=epilog, context_settings=settings)(_quiet_when_unread(command))
    return guarded(verb, lambda: int(app(args=arguments, prog_name=f"holdfast {verb}", standalone_mode=False) or 0))


def guarded(verb: str, work: Callable[[], int]) -> int:
    """Run the work of a verb; an error is one line on stderr and an exit code."""
    ours = OURS if verb in _EXIT_AS_THE_COMMAND else FAILED
    try:
        return work()
    except (HoldfastError, OSError) as error:
        complain(describe(error))
        return exit_code_of(error, ours=ours)
    except (KeyboardInterrupt, typer.Abort, asyncio.CancelledError):
        return INTERRUPTED
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        # typer lists choices on lines of their own.
        message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
        complain(f"{verb}: {message}. See `holdfast {verb} --help`.")
        return OURS if ours == OURS else USAGE


def _lines(command: Callable[..., int]) -> list[str]:
    """Return the paragraphs of a docstring, each as one line: typer would keep the line breaks of the source."""
    return [" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n")]


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's coroutine and return its result, usually the exit code."""
    return asyncio.run(work)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports of an optional part: raise an error that names the extra if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "holdfast":
            raise  # a bug of ours
        raise InvalidParams(f"this needs {error.name}: pip install 'holdfast[{extra}]'") from None


def service_extra() -> AbstractContextManager[None]:
    """Around imports of the session service."""
    return needs_extra("service")


def _quiet_when_unread(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap a verb: if the reader of stdout closes it (`holdfast ps | head`), exit as PIPE ends other programs."""

    @functools.wraps(command)
    def guarded(**values: Any) -> int:
        try:
            code = command(**values)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            discard_stdout()
            return BROKEN_PIPE

    return guarded
