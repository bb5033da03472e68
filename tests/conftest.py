"""Shared by all tests: Hypothesis settings, the table of skipped tests, and exec interfaces without a server."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.order import rank, unit_of_work
from tests.support.parts import add_node_to_path, skip_table

if TYPE_CHECKING:
    from holdfast.runtime.local import LocalExec

settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("holdfast")


def pytest_configure(config: pytest.Config) -> None:
    add_node_to_path()
    keep_bytecode()
    leave_home(config)
    # Else gRPC starts its threads again between a child's fork and exec, and they may print on its terminal.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    # Started in the background of a script we would ignore these, and so would programs that tests send them to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def keep_bytecode() -> None:
    """Let Python write bytecode, whatever the environment contains: tests start thousands of interpreters.

    Without bytecode each server compiles the package, which takes three times as long as the rest of its start, and
    each worker rewrites the assertions of every test module.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def leave_home(config: pytest.Config) -> None:
    """Give login shells an empty home: a profile of the user that runs the tests may be slow, or hang.

    A version manager in a profile may wait for a lock, which a login shell that a test killed has left.
    """
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    home = tempfile.TemporaryDirectory(prefix="hf-home-")
    config.add_cleanup(home.cleanup)
    os.environ["HOME"] = home.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it sorts by the number of tests
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = unit_of_work
    return scheduler


def pytest_collection_finish() -> None:
    # Thousands of tests stay until the end: a garbage collection that visits all of them takes half a second.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of skipped tests, or leave it in a file for `support/run.py`, which prints it last."""
    reports = terminalreporter.stats.get
    lines = skip_table(report.longrepr[2].removeprefix("Skipped: ") for report in reports("skipped", []))
    if path := os.environ.get("HOLDFAST_TEST_OUTCOMES"):
        failed = sorted({report.nodeid for kind in ("failed", "error") for report in reports(kind, [])})
        Path(path).write_text(json.dumps({"failed": failed, "skipped": lines}))
    else:
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _passable_directories(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests start programs as other users, which must reach the files that a test has opened to them."""
    base = tmp_path_factory.getbasetemp()
    for place in (base, *base.parents):
        if place == Path(tempfile.gettempdir()):
            break
        place.chmod(0o755)


@pytest.fixture
async def make_exec(tmp_path: Path) -> AsyncIterator[Callable[..., LocalExec]]:
    """Makes exec interfaces in this process; whatever they still run when the test ends is killed."""
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.local import LocalExec

    made: list[LocalExec] = []

    def make(*, environ: dict[str, str] | None = None, open_files: int | None = None, **settings: Any) -> LocalExec:
        settings.setdefault("spool_directory", str(tmp_path / "spool"))
        made.append(LocalExec(ExecServerConfig(**settings), environ=environ, open_files=open_files))
        return made[-1]

    yield make
    for each in made:
        await each.shutdown(0)


@pytest.fixture
async def box(make_exec: Callable[..., LocalExec]) -> LocalExec:
    """One with the settings as they come."""
    return make_exec()
