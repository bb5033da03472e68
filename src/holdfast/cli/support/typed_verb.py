"""Runs one of the verbs that people type: its module's `command` function, or one of its `SUB_VERBS`, by typer.

Only that module is imported. Errors become one line on stderr and an exit code; a traceback means a bug of ours.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import typer

from holdfast.cli import VERBS
from holdfast.cli.support.exit_codes import BROKEN_PIPE, FAILED, INTERRUPTED, OURS, USAGE, describe, exit_code_of
from holdfast.cli.support.text import complain, discard_stdout
from holdfast.errors import HoldfastError

T = TypeVar("T")

#: Verbs whose exit code is the command's: what goes wrong on our side must not look like the command's own 1 or 2.
_EXIT_AS_THE_COMMAND: Final = ("run", "wait", "attach", "bridge", "shell", "shell run")

#: typer carries its own copy of click from 0.20 on and imports click before, so the class is found by inheritance.
_UsageError: Final = typer.BadParameter.__mro__[1]


def run(verb: str, arguments: list[str]) -> int:
    """Parse the arguments, run the verb, return the exit code."""
    module = importlib.import_module(f"holdfast.cli.verbs.{VERBS[verb][0]}")
    command: Callable[..., int] = module.command
    sub_verbs: dict[str, Callable[..., int]] = getattr(module, "SUB_VERBS", {})
    epilog = "\n\n".join(f"holdfast {verb} {name}: {_lines(each)[0]}" for name, each in sub_verbs.items())
    if sub_verbs and arguments and not arguments[0].startswith("-"):
        sub_verb, *arguments = arguments
        if sub_verb not in sub_verbs:
            complain(f"{verb}: no sub-verb {sub_verb!r}; there are {', '.join(sub_verbs)}")
            return USAGE
        command, epilog = sub_verbs[sub_verb], ""
        verb = f"{verb} {sub_verb}"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # What follows the command's name belongs to the command: `holdfast run ls -l`.
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
    """The paragraphs of its description, each as one line: typer would break them where the source does."""
    return [" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n")]


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's coroutine to its end; its result is the exit code, mostly."""
    return asyncio.run(work)


def _quiet_when_unread(command: Callable[..., int]) -> Callable[..., int]:
    """The verb, ending as PIPE ends other programs when whoever read our stdout has left (`holdfast ps | head`)."""

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
