"""`harbor run -a oracle` on a local dataset: each trial runs in a jail, and its reward is that of the task's tests.

The program runs in a network namespace of its own without a route, so that nothing leaves this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import holdfast.sync

EXAMPLE = Path(__file__).parents[3] / "examples" / "integrations" / "harbor_tasks" / "kernel"
#: The solution and the test of each task, further lines of its task.toml, and the expected reward.
TASKS: dict[str, tuple[str, str, str, float]] = {
    "files": ("mkdir -p deep; printf answer > deep/file", 'test "$(cat deep/file)" = answer', "", 1.0),
    "unsolved": ("true", "test -e missing", "", 0.0),
    "variables": (
        'echo "$GIVEN" > out',
        'grep -qx "from the task" out',
        '[environment.env]\nGIVEN = "from the task"\n',
        1.0,
    ),
    "users": (
        "id -un > /tmp/who",
        "grep -qx nobody /tmp/who && id -un | grep -qx root",
        '[agent]\nuser = "nobody"\n',
        1.0,
    ),
    "network": (
        "cat /proc/net/dev > devices",
        "test $(tail -n +3 devices | cut -d: -f1 | tr -d ' ') = lo",
        '[environment]\nnetwork_mode = "no-network"\n',
        1.0,
    ),
}


def write_task(directory: Path, solution: str, test: str, more: str) -> None:
    for name, content in {
        "instruction.md": "Do it.\n",
        "solution/solve.sh": f"#!/bin/bash\ncd /workspace\n{solution}\n",
        "tests/test.sh": f"#!/bin/bash\ncd /workspace\n({test}) && echo 1 > /logs/verifier/reward.txt"
        " || echo 0 > /logs/verifier/reward.txt\n",
        "environment/.keep": "",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    sections = {"environment": ['workdir = "/workspace"'], "agent": [], "verifier": ['user = "root"']}
    section = ""
    for line in more.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            sections.setdefault(section, [])
        else:
            sections[section].append(line)
    text = "\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items())
    (directory / "task.toml").write_text(f'schema_version = "1.4"\n{text}\n')


def harbor(*arguments: str, cwd: Path, alone: bool = True) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(
        [*(("unshare", "--net") if alone else ()), sys.executable, "-m", "harbor.cli.main", *arguments],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


def results(jobs: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in jobs.glob("*/*/result.json")]
    return {result["task_name"].rpartition("/")[2]: result for result in found}


def test_the_oracle_gets_the_rewards_of_the_tests(tmp_path: Path) -> None:
    for name, (solution, test, more, _) in TASKS.items():
        write_task(tmp_path / "dataset" / name, solution, test, more)
    shutil.copytree(EXAMPLE, tmp_path / "dataset" / EXAMPLE.name)
    environment = "holdfast.integrations.harbor:Environment"
    done = harbor(
        *("run", "-p", "dataset", "-a", "oracle", "-e", environment, "-o", "jobs", "-n", "3", "--yes"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr

    rewards = {name: result["verifier_result"] for name, result in results(tmp_path / "jobs").items()}
    assert {name: each["rewards"]["reward"] for name, each in rewards.items()} == {
        EXAMPLE.name: 1.0,
        **{name: reward for name, (*_, reward) in TASKS.items()},
    }, done.stdout
    with holdfast.sync.Fleet("bwrap") as fleet:
        assert fleet.list() == []
