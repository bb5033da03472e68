"""`python -m bench`: run the benchmarks, print the table, write it as JSON and, with `--markdown`, into a page.

The exit code is 0 when every benchmark finished, whatever its figures, and 1 when one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from bench import (
    bridge,
    command_line,
    files,
    fleet,
    flood,
    forward,
    live_shells,
    mcp,
    memory,
    recovery,
    report,
    sandboxes,
    service,
    starts,
    streams,
    terminals,
)
from bench.measure import FULL, QUICK, Row, Scale
from bench.servers import BenchmarkError
from holdfast.errors import HoldfastError

Benchmark = Callable[[Scale], Awaitable[list[Row]]]

#: In the order of the table.
BENCHMARKS: Final[dict[str, Benchmark]] = {
    "true": starts.start_to_exit,
    "true-16": starts.sixteen_at_once,
    "cat": streams.echo,
    "unix": streams.over_unix,
    "websocket": streams.over_websocket,
    "forward": forward.forwarded,
    "rss": memory.resident,
    "list": flood.list_during_a_flood,
    "start-1000": starts.beside_a_crowd,
    "exec": command_line.stateless_exec,
    "cli": command_line.verbs,
    "shell-true": live_shells.true_in_a_shell,
    "shell-lines": live_shells.lines_of_a_shell,
    "shell-32": live_shells.shells_at_once,
    "shell-rss": live_shells.memory_of_a_shell,
    "terminal-true": terminals.true_in_a_terminal,
    "terminal-key": terminals.key_echo,
    "terminal-flood": terminals.flood_of_a_terminal,
    "terminal-screen": terminals.screen_after_a_flood,
    "terminal-rss": terminals.memory_of_a_terminal,
    "files": files.there_and_back,
    "read-file": files.small_file,
    "kept-start": recovery.start_under_a_keeper,
    "kept-1000": recovery.crowd_across_a_kill,
    "kept-stream": recovery.stream_across_a_kill,
    "box": sandboxes.in_containers,
    "fleet": fleet.making,
    "mcp": mcp.exec_command,
    "bridge-call": bridge.one_call,
    "bridge-streams": bridge.streams_at_once,
    "bridge-rss": bridge.memory_of_calls,
    "service-true": service.true_in_a_session,
    "service-idle": service.idle_sessions,
    "service-200": service.agents_at_once,
    "service-shells": service.shells_at_once,
}
#: Each takes less than a minute on a machine that is not overloaded; this turns a hang into a failure.
PATIENCE_SECONDS: Final = 600.0


def main() -> int:
    options = _options()
    machine = report.this_machine()
    began = monotonic()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in options.only or BENCHMARKS:
        sys.stderr.write(f"{name} ...\n")
        try:
            rows += asyncio.run(_run(BENCHMARKS[name], QUICK if options.quick else FULL))
        # The others' figures are worth having all the same.
        except (BenchmarkError, HoldfastError, AssertionError, OSError, subprocess.SubprocessError) as error:
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
    result = report.Report(machine, options.quick, round(monotonic() - began, 1), tuple(rows), failures)
    print(f"{report.facts(result)}\n\n{report.table(rows)}")
    report.write_json(options.json, result)
    for name, failure in failures.items():
        sys.stderr.write(f"{name} failed: {failure}\n")
    if options.markdown is not None and not failures:
        report.write_markdown(options.markdown, result)
    return 1 if failures else 0


async def _run(benchmark: Benchmark, scale: Scale) -> list[Row]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await benchmark(scale)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure holdfast beside its baselines.")
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it runs, not how fast")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--json", default="bench/results.json", metavar="FILE", help="where the figures go (%(default)s)"
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help=f"a page that gets the table between the marks <!-- {report.MARK} -->"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
