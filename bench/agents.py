"""`python -m bench.agents [NAME ...]`: local providers of agent frameworks beside ours, in one run.

`agent_providers.py` takes the samples in the environment of `make integrations`. An environment that is missing is
named, and its rows are left out.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import report
from bench.agent_providers import IMAGE
from bench.measure import Row, Target, compare, latencies
from tests.support.engines import Missing, debian_root, docker_engine
from tests.support.integrations import ROOT, interpreter, suite_variables

FRAMEWORKS: Final = {
    "deepagents": "`LocalShellBackend`: a child process, without isolation",
    "openai-agents-docker": "`DockerSandboxClient`",
    "openai-agents": "`UnixLocalSandboxClient`: a child process, without isolation",
    "pydantic-ai": "`LocalWorkspaceBackend`: a child process, without isolation",
}
#: What is measured, and the ratio that a jail may cost. A start has none: the others make a directory.
MEASUREMENTS: Final[dict[str, tuple[str, Target | None]]] = {
    "exec": ("`true` by a shell", Target("ratio at most", 1.0)),
    "output": ("10 MB of output", Target("ratio at most", 1.0)),
    "start": ("a new sandbox until a command has ended", None),
}
#: For one framework; a busy machine takes ten times as long as an idle one.
PROGRAM_SECONDS: Final = 300


def measure(name: str) -> list[Row]:
    """The rows of one framework; none if its environment is missing."""
    environment = name.removesuffix("-docker")
    python = interpreter(environment)
    if python is None:
        sys.stderr.write(f"{name}: no environment: make integrations ONLY={environment}\n")
        return []
    with contextlib.ExitStack() as stack:
        if name.endswith("-docker"):
            try:
                engine = stack.enter_context(docker_engine())
            except Missing as missing:
                sys.stderr.write(f"{name}: {missing}\n")
                return []
            engine.image(debian_root(Path(stack.enter_context(tempfile.TemporaryDirectory()))), IMAGE)
        return rows(name, python)


def rows(name: str, python: Path) -> list[Row]:
    with suite_variables() as variables:
        done = subprocess.run(
            [python, "-m", "bench.agent_providers", name],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            timeout=PROGRAM_SECONDS,
            check=True,
        )
    samples = json.loads(done.stdout.splitlines()[-1])
    return [
        compare(
            f"{name}-{key}",
            what,
            "ms",
            baseline_what=FRAMEWORKS[name],
            baseline=latencies(samples[key]["baseline"]),
            measured=latencies(samples[key]["holdfast"]),
            target=target,
            note="" if target or name.endswith("-docker") else "a jail beside a directory",
        )
        for key, (what, target) in MEASUREMENTS.items()
    ]


def main() -> int:
    print(report.table([row for name in sys.argv[1:] or FRAMEWORKS for row in measure(name)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
