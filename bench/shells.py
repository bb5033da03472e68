"""Session shells of others beside ours: `python -m bench.shells` prints two tables, of figures and of edge cases.

Each make runs in a program of its own (`bench.shell_program`); the programs take their samples in turns. A make
that is not installed is named and left out. It takes minutes, because the peers do, so it is not part of `python -m
bench`. Touches the processes that it starts, and with `--markdown` a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench import report
from bench.live_shells import BATCH, SHELLS, file_of_lines
from bench.measure import latencies
from bench.shell_edges import EDGES, TIMES_OUT
from tests.support.integrations import ROOT, interpreter, suite_variables

#: The makes in the order of the table, each with the environment of `make integrations` that has its packages.
MAKES: Final[dict[str, str | None]] = {
    "bash": None,
    "pexpect": None,
    "pexpect-undelayed": None,
    "swe-rex": None,
    "openhands": "openhands",
    "openhands-pty": "openhands",
    "tmux": None,
    "inspect": "inspect",
    "holdfast": None,
    "holdfast-terminal": None,
}
OURS: Final = "holdfast"
#: Ours for what is typed, if it is measured.
OUR_TERMINAL: Final = "holdfast-terminal"
#: The bare bash is the least that a shell can cost, not a peer.
NO_PEERS: Final = ("bash", OURS, OUR_TERMINAL)
#: Makes whose edge cases say nothing: two are terminals with line ends of their own and no end of a command but the
#: one that the benchmark types, and one has no sessions.
NO_EDGES: Final = ("tmux", "inspect", OUR_TERMINAL)
MARK: Final = "shells"
EDGES_MARK: Final = "shell-edges"
#: For one request: 32 sessions of a peer that takes some seconds for each.
REQUEST_SECONDS: Final = 300.0


class Cell(msgspec.Struct, frozen=True):
    """A figure of one make. Without a `rank` it takes no part in the comparison: it failed, or did half the job."""

    text: str
    #: Lower is better.
    rank: float | None = None


#: A row of measurements: a cell for each make.
Column = dict[str, Cell]


class Peer:
    """The program of one make."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._replies = process.stdin, process.stdout
        self._hangs = False
        self.greeting = self._receive()

    def ask(self, what: str, **arguments: object) -> Any:
        """The result of an operation; `PeerError` if it raised, or if the program hangs or has ended."""
        if self._hangs:
            raise PeerError(TIMES_OUT)
        try:
            self._requests.write(json.dumps({"do": what, **arguments}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise PeerError("ended") from None
        reply = self._receive()
        if "raised" in reply:
            raise PeerError(reply["raised"])
        return reply["result"]

    def _receive(self) -> dict[str, Any]:
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        if not poller.poll(REQUEST_SECONDS * 1000):
            self._hangs = True
            self._process.kill()
            raise PeerError(TIMES_OUT)
        line = self._replies.readline()
        if not line:
            raise PeerError("ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


class PeerError(Exception):
    """A peer raised, hangs or has ended; the text is for the table."""


@contextlib.contextmanager
def running(names: Sequence[str]) -> Iterator[dict[str, Peer]]:
    """The programs of the makes that are installed; the others are named on stderr."""
    with contextlib.ExitStack() as stack:
        # Without rc files: interactive shells would read those of the current user.
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-home-"))
        variables = {**stack.enter_context(suite_variables()), "HOME": home}
        peers: dict[str, Peer] = {}
        for name in names:
            environment = MAKES[name]
            python = Path(sys.executable) if environment is None else interpreter(environment)
            if python is None:
                sys.stderr.write(f"{name}: no environment: make integrations ONLY={environment}\n")
                continue
            process = stack.enter_context(
                subprocess.Popen(
                    [python, "-m", "bench.shell_program", name],
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            peer = Peer(process)
            if "missing" in peer.greeting:
                sys.stderr.write(f"{name}: {peer.greeting['missing']}\n")
            else:
                peers[name] = peer
        yield peers


# --- measurements ------------------------------------------------------------------------------------------------


def _latency(peers: Mapping[str, Peer], what: str, rounds: int, count: int) -> Column:
    """Latencies by all of them in turns; the first turn of each is discarded."""
    taken: dict[str, list[list[float]]] = {name: [] for name in peers}
    failed: dict[str, str] = {}
    for number in range(-1, rounds):
        for name, peer in peers.items():
            if name in failed:
                continue
            try:
                samples = peer.ask(what, count=1 if number < 0 else count)
            except PeerError as error:
                failed[name] = str(error)
            else:
                taken[name] += [samples] if number >= 0 else []
    column = {name: Cell(problem) for name, problem in failed.items()}
    for name, each in taken.items():
        if name not in failed:
            figure = latencies(each)
            column[name] = Cell(
                f"{report.digits(figure.median)} / {report.digits(figure.p99 or 0.0)} ms", figure.median
            )
    return column


def _each(peers: Mapping[str, Peer], what: str, show: Callable[[Any], Cell], **arguments: object) -> Column:
    """One request to each of them, one after the other."""
    column: Column = {}
    for name, peer in peers.items():
        try:
            column[name] = show(peer.ask(what, **arguments))
        except PeerError as error:
            column[name] = Cell(str(error))
    return column


def _stream(size: int) -> Callable[[dict[str, Any]], Cell]:
    def show(result: dict[str, Any]) -> Cell:
        fault = result["fault"]
        complete = fault in ("", "line ends changed")
        text = f"{report.digits(size / result['seconds'] / 1e6)} MB/s, {fault or 'exact'}"
        return Cell(text, result["seconds"] if complete else None)

    return show


def _kill(result: dict[str, Any]) -> Cell:
    left = result["left"]
    text = f"{report.digits(result['seconds'] * 1000)} ms, {left or 'none'} left"
    return Cell(text, result["seconds"] if not left else None)


def figures(peers: Mapping[str, Peer], *, quick: bool) -> dict[str, Column]:
    """All measurements but the edge cases."""
    rounds, shells, size = (1, 4, 1_000_000) if quick else (5, SHELLS, 10_000_000)
    columns = {
        "start, p50 / p99": _latency(peers, "start", rounds, 2 if quick else 5),
        "`true`, p50 / p99": _latency(peers, "true", rounds, BATCH),
        "echo, p50 / p99": _latency(peers, "echo", rounds, BATCH),
    }
    with file_of_lines(size) as (path, _):
        columns[f"{size // 1_000_000} MB of lines"] = _each(peers, "stream", _stream(size), path=path)
    columns["kill of a tree"] = _each(peers, "kill", _kill)
    many: dict[str, Any] = {}
    failed: Column = {}
    for name, peer in peers.items():
        try:
            many[name] = peer.ask("many", shells=shells)
        except PeerError as error:
            failed[name] = Cell(str(error))
    columns[f"{shells} sessions at once"] = failed | {
        name: Cell(f"{report.digits(each['rate'])} /s", -each["rate"]) for name, each in many.items()
    }
    columns["memory with one session"] = failed | {
        name: Cell(f"{each['one'] / 1e6:,.1f} MB", each["one"]) for name, each in many.items()
    }
    columns["for each further one"] = failed | {
        name: Cell(f"{each['each'] / 1e3:,.0f} KB", each["each"]) for name, each in many.items()
    }
    return columns


def edges(peers: Mapping[str, Peer]) -> dict[str, Column]:
    """The verdicts on the edge cases."""
    judged = {name: peer for name, peer in peers.items() if name not in NO_EDGES}
    return {edge.what: _each(judged, "edge", Cell, number=number) for number, edge in enumerate(EDGES)}


# --- tables ------------------------------------------------------------------------------------------------------


def by_make(names: Mapping[str, str], columns: Mapping[str, Column]) -> str:
    """The figures as Markdown: a line for each make, which there are more of than figures."""
    lines = [["", *columns]]
    lines += [[shown, *(column[name].text for column in columns.values())] for name, shown in names.items()]
    return report.pipes(lines)


def by_edge(names: Mapping[str, str], columns: Mapping[str, Column]) -> str:
    """The verdicts as Markdown: a line for each edge case."""
    judged = [name for name in names if name not in NO_EDGES]
    lines = [["", *(names[name] for name in judged)]]
    lines += [[what, *(column[name].text for name in judged)] for what, column in columns.items()]
    return report.pipes(lines)


def ahead(names: Mapping[str, str], columns: Mapping[str, Column]) -> list[str]:
    """A line for each figure in which a peer is ahead of ours: the figure, the peers and their advantage."""
    lines = []
    for what, column in columns.items():
        ours = [column[name].rank for name in (OURS, OUR_TERMINAL) if name in column]
        ranks = [rank for rank in ours if rank is not None]
        if not ranks:
            continue
        best = min(ranks)
        peers = [
            f"{names[name]} ({_times(best, cell.rank)})"
            for name, cell in column.items()
            if name not in NO_PEERS and cell.rank is not None and cell.rank < best
        ]
        if peers:
            lines.append(f"- {what}: {', '.join(peers)}")
    return lines


def _times(ours: float, theirs: float) -> str:
    larger, smaller = max(abs(ours), abs(theirs)), min(abs(ours), abs(theirs))
    return f"{larger / smaller:.2g} x" if smaller else "by far"


def main() -> int:
    options = _options()
    machine = report.this_machine()
    with running(options.only) as peers:
        names = {name: peer.greeting["name"] for name, peer in peers.items()}
        measured = figures(peers, quick=options.quick)
        judged = edges(peers)
    head = report.facts(report.Report(machine, options.quick, 0.0, (), {}))
    better = ahead(names, measured)
    summary = "\n".join(["Ahead of Holdfast:", "", *better]) if better else "No peer is ahead of Holdfast."
    text = f"{head}.\n\n{by_make(names, measured)}\n\n{summary}"
    verdicts = by_edge(names, judged)
    print(f"{text}\n\n{verdicts}")
    if options.markdown is not None:
        report.write_into(options.markdown, text, MARK)
        report.write_into(options.markdown, verdicts, EDGES_MARK)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.shells", description="Compare session shells.")
    parser.add_argument("--quick", action="store_true", help="less of everything: shows that it runs, not how fast")
    parser.add_argument(
        "--only", nargs="+", choices=MAKES, default=list(MAKES), metavar="NAME", help=", ".join(MAKES)
    )
    parser.add_argument("--markdown", metavar="FILE", help="a page that gets the tables between its marks")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
