"""The work while faults are thrown: the kinds of jobs, and how often each is drawn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from .job_context import JobContext
from .jobs_of_a_foreign_client import foreign
from .jobs_on_pipes import (
    background,
    bound,
    echo,
    given_up,
    later,
    lines,
    pipes,
    quick,
    signals,
    storm,
    stream,
    tree,
)
from .jobs_with_state import pty, shell, shell_job, terminal

#: How often each kind of job is drawn.
JOBS: Final[dict[Callable[[JobContext], Coroutine[Any, Any, None]], int]] = {
    pipes: 5,
    stream: 3,
    quick: 4,
    lines: 2,
    echo: 4,
    later: 3,
    background: 2,
    tree: 2,
    signals: 2,
    storm: 2,
    given_up: 2,
    foreign: 3,
    bound: 1,
    pty: 3,
    terminal: 2,
    shell: 3,
    shell_job: 1,
}
