"""The cost of one call of the command line, from its start to its end, beside a bare interpreter's start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Final

from bench.measure import Row, Samples, Scale, Target, compare, interleave_samples, latencies
from bench.servers import BenchmarkError
from tests.support.servers import running_server, server_environment

REQUEST: Final = '{"jsonrpc":"2.0","id":1,"method":"environment/status"}'
BARE: Final = (sys.executable, "-I", "-S", "-c", "import socket, json")


async def stateless_exec(scale: Scale) -> list[Row]:
    command, shown = _command()
    command = (*command, "exec")
    with running_server() as server:
        environment = server_environment(HOLDFAST_DIRECTORY=server.directory)
        _check(command, environment, server.pid)
        taken = await interleave_samples(
            scale.rounds,
            scale.calls,
            {"bare": _calling(BARE, environment), "exec": _calling((*command, REQUEST), environment)},
        )
    return [
        compare(
            "exec",
            f"`{shown} exec`, server running, whole call",
            "ms",
            baseline_what="python -I -S -c 'import socket, json'",
            baseline=latencies(taken["bare"]),
            measured=latencies(taken["exec"]),
            target=Target("ratio at most", 3.0),
        )
    ]


async def verbs(scale: Scale) -> list[Row]:
    """`run`, and the verbs that read a process that has ended."""
    command, shown = _command()
    ended = "ended"
    calls = {
        "run -- true": ("run", "--", "true"),
        "ps": ("ps",),
        "logs": ("logs", ended),
        "wait": ("wait", ended),
        "kill": ("kill", ended),
        "completion ids": ("completion", "ids", "process"),
    }
    with running_server() as server:
        environment = server_environment(HOLDFAST_DIRECTORY=server.directory)
        _check((*command, "exec"), environment, server.pid)
        _call((*command, "run", "--id", ended, "--", "echo", "a line"), environment)
        taken = await interleave_samples(
            scale.rounds,
            scale.calls,
            {
                "bare": _calling(BARE, environment),
                **{name: _calling((*command, *words), environment) for name, words in calls.items()},
            },
        )
    return [
        compare(
            f"cli-{words[0]}",
            f"`{shown} {name}`, server running, whole call",
            "ms",
            baseline_what="python -I -S -c 'import socket, json'",
            baseline=latencies(taken["bare"]),
            measured=latencies(taken[name]),
            # A person waits for a completion after each key press.
            target=Target("at most", 100.0) if words[0] == "completion" else Target("ratio at most", 4.0),
        )
        for name, words in calls.items()
    ]


def _command() -> tuple[tuple[str, ...], str]:
    """The installed console script of this interpreter if there is one, else the module."""
    script = os.path.join(os.path.dirname(sys.executable), "holdfast")
    if os.access(script, os.X_OK):
        return (script,), "holdfast"
    return (sys.executable, "-m", "holdfast"), "python -m holdfast"


def _check(command: Sequence[str], environment: Mapping[str, str], pid: int) -> None:
    """The call must reach the server that we started, or a start of another would be measured."""
    done = subprocess.run([*command, REQUEST], env=environment, stdout=subprocess.PIPE, check=True)
    answered = json.loads(done.stdout)["result"]["pid"]
    if answered != pid:
        raise BenchmarkError(f"server {answered} answered, not {pid}")


def _calling(argv: Sequence[str], environment: Mapping[str, str]) -> Samples:
    async def timed() -> list[float]:
        return [_call(argv, environment)]

    return timed


def _call(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    began = perf_counter()
    subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - began
