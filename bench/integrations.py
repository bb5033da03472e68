"""`python -m bench.integrations [NAME ...]`: a framework's own provider beside ours, and servers beside our client.

Each contest has a program (`bench/integration_*.py`) that runs in the environment of `make integrations` and prints
its samples as one line of JSON: for each measurement the rounds of both contenders, taken in turns. To add one: its
program, and its rows in `CONTESTS`. A contest whose environment or engine is missing is named and left out.
`docs/benchmarks.md` describes each row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from bench import mcp, report
from bench.integration_agents import IMAGE
from bench.measure import FULL, QUICK, Row, Target, Unit, compare, figures, latencies
from tests.support.engines import Missing, debian_root, docker_engine
from tests.support.integrations import ROOT, interpreter, suite_variables

#: For one contest: `exec_remote` of Inspect takes seconds for each sample, and a loaded machine ten times as long.
PROGRAM_SECONDS: Final = 900
#: The name of the contest that needs no environment of its own.
MCP: Final = "mcp"
MARK: Final = "integrations"

AT_MOST_EQUAL: Final = Target("ratio at most", 1.0)
TENTH: Final = Target("ratio at most", 0.1)
TRIPLE: Final = Target("ratio at most", 3.0)


class Measurement(msgspec.Struct, frozen=True):
    """One row of a contest. `name` is the key of its samples; a rate is one figure a round."""

    name: str
    what: str
    baseline_what: str
    target: Target | None = None
    unit: Unit = "ms"


class Contest(msgspec.Struct, frozen=True):
    """A program, the environment that it runs in, and its rows. With `docker`, an engine of its own runs beside."""

    environment: str
    program: str
    rows: tuple[Measurement, ...]
    docker: bool = False


def provider(environment: str, baseline: str, *, docker: bool = False) -> Contest:
    """A provider of an agent framework beside ours, on the same engine or in a jail."""
    rows = (
        Measurement("exec", "`true` by a shell", baseline, AT_MOST_EQUAL),
        Measurement("output", "10 MB of output", baseline, AT_MOST_EQUAL),
        Measurement("start", "a new sandbox until a command has ended", baseline, AT_MOST_EQUAL),
    )
    return Contest(environment, "integration_agents", rows, docker)


def inspect(baseline: str, *, docker: bool = False) -> Contest:
    """A provider of Inspect beside ours."""
    rows = (
        Measurement("exec", '`sandbox().exec(["true"])`', baseline, AT_MOST_EQUAL),
        Measurement("remote", '`exec_remote(["true"], stream=False)`', baseline, TENTH),
        Measurement("line", "from a printed line to its event", baseline, TENTH),
        Measurement("output", "`exec` with 10 MB of output", baseline, AT_MOST_EQUAL),
        Measurement("start", "`sample_init` until a command has ended", baseline, AT_MOST_EQUAL),
    )
    return Contest("inspect", "integration_inspect", rows, docker)


def _local(name: str) -> str:
    return f"`{name}`: a child process, without isolation"


CONTESTS: Final[dict[str, Contest]] = {
    "inspect": inspect("Inspect's `local`: a child process, without isolation"),
    "inspect-docker": inspect("Inspect's `docker`", docker=True),
    "deepagents": provider("deepagents", _local("LocalShellBackend")),
    "mini-swe-agent": provider("mini-swe-agent", _local("LocalEnvironment")),
    "mini-swe-agent-docker": provider("mini-swe-agent", "`DockerEnvironment`", docker=True),
    "openai-agents": provider("openai-agents", _local("UnixLocalSandboxClient")),
    "openai-agents-docker": provider("openai-agents", "`DockerSandboxClient`", docker=True),
    "pydantic-ai": provider("pydantic-ai", _local("LocalWorkspaceBackend")),
    "e2b": Contest(
        "e2b",
        "integration_e2b",
        (
            Measurement("true", 'E2B `commands.run("true")`', '`box.exec(["true"])`, without a shell', TRIPLE),
            Measurement(
                "login", 'E2B `commands.run("true")`', "`box.exec` of the same login shell with `true`", TRIPLE
            ),
            Measurement(
                "sdk", 'E2B `commands.run("true")`', "the same call of the SDK to a server that runs nothing"
            ),
            Measurement("write", "E2B `files.write` of 100 MB", "`box.write_file`", unit="MB/s"),
            Measurement("read", "E2B `files.read` of 100 MB", "`box.read_file`", unit="MB/s"),
            Measurement("sandboxes", "100 sandboxes of one E2B server, each with a command", "the same by `Fleet`"),
        ),
    ),
}


def measure(name: str, *, quick: bool = False) -> list[Row]:
    """The rows of one contest; none if a part that it needs is missing."""
    if name == MCP:
        return asyncio.run(mcp.exec_command(QUICK if quick else FULL))
    contest = CONTESTS[name]
    python = interpreter(contest.environment)
    if python is None:
        sys.stderr.write(f"{name}: no environment: make integrations ONLY={contest.environment}\n")
        return []
    with contextlib.ExitStack() as stack:
        if contest.docker:
            try:
                engine = stack.enter_context(docker_engine())
            except Missing as missing:
                sys.stderr.write(f"{name}: {missing}\n")
                return []
            # zlib is for the programs that Inspect's provider installs.
            root = debian_root(Path(stack.enter_context(tempfile.TemporaryDirectory())), "zlib1g")
            engine.image(root, IMAGE)
        samples = _samples(python, contest.program, name, *(["--quick"] if quick else []))
    return [_row(name, each, samples[each.name]) for each in contest.rows if each.name in samples]


def _samples(python: Path, program: str, *arguments: str) -> dict[str, dict[str, list[list[float]]]]:
    with suite_variables() as variables:
        done = subprocess.run(
            [python, "-m", f"bench.{program}", *arguments],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            timeout=PROGRAM_SECONDS,
            check=True,
        )
    samples: dict[str, dict[str, list[list[float]]]] = json.loads(done.stdout.splitlines()[-1])
    return samples


def _row(name: str, each: Measurement, samples: dict[str, list[list[float]]]) -> Row:
    baseline, measured = (
        latencies(samples[contender]) if each.unit == "ms" else figures([one for (one,) in samples[contender]])
        for contender in ("baseline", "holdfast")
    )
    return compare(
        f"{name}-{each.name}",
        each.what,
        each.unit,
        baseline_what=each.baseline_what,
        baseline=baseline,
        measured=measured,
        target=each.target,
    )


def main() -> int:
    options = _options()
    machine, began = report.this_machine(), monotonic()
    rows = [row for name in options.names or (*CONTESTS, MCP) for row in measure(name, quick=options.quick)]
    print(report.table(rows))
    result = report.Report(machine, options.quick, round(monotonic() - began, 1), tuple(rows), {})
    if options.json is not None:
        report.write_json(options.json, result)
    if options.markdown is not None:
        report.write_markdown(options.markdown, result, MARK)
    return 0


def _options() -> argparse.Namespace:
    names = (*CONTESTS, MCP)
    parser = argparse.ArgumentParser(
        prog="python -m bench.integrations", description="Measure the providers of other software beside ours."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument("--json", metavar="FILE", help="where the figures go")
    parser.add_argument("--markdown", metavar="FILE", help="a page that gets the table between its marks")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no contest {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
