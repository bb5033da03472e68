"""mini-swe-agent's command line with a scripted model, and its environment alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted

from holdfast.integrations.mini_swe_agent import Environment
from holdfast.sync import Fleet

#: The environment of the example.
EXAMPLE = Path(__file__).parents[3] / "examples" / "integrations" / "mini_swe_agent.yaml"
CLASS = "holdfast.integrations.mini_swe_agent.Environment"


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    made = get_environment({"environment_class": CLASS, "env": {"COLOUR": "green"}, "timeout": 5})
    yield made
    made.cleanup()
    with Fleet("bwrap") as fleet:
        assert made.box.ref.id not in [ref.id for ref in fleet.list()]


def test_a_command_has_its_output_in_the_printed_order(environment: Environment) -> None:
    result = environment.execute({"command": "echo out; echo err >&2; echo $COLOUR; exit 3"})
    assert result == {"output": "out\nerr\ngreen\n", "returncode": 3, "exception_info": ""}


def test_files_stay_and_variables_do_not(environment: Environment) -> None:
    environment.execute({"command": "echo kept > file; export LOST=yes; cd /"})
    result = environment.execute({"command": "cat file; echo $LOST"})
    assert result["output"] == "kept\n\n"
    assert environment.execute({"command": "pwd"}, cwd="/usr")["output"] == "/usr\n"


def test_a_timeout_is_a_result_with_the_output_so_far(environment: Environment) -> None:
    result = environment.execute({"command": "echo begun; sleep 1000"}, timeout=2)
    assert (result["returncode"], result["output"]) == (-1, "begun\n")
    assert result["extra"]["exception_type"] == "TimeoutError"


def test_the_marker_of_completion_submits(environment: Environment) -> None:
    with pytest.raises(Submitted):
        environment.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo result"})


def test_the_command_line_runs_in_a_sandbox_and_leaves_none(tmp_path: Path) -> None:
    def says(command: str) -> dict[str, object]:
        return {"role": "assistant", "content": "next", "extra": {"actions": [{"command": command}], "cost": 0.0}}

    config = {
        "agent": {
            "agent_class": "default",
            "system_template": "You work on {{system}}.",
            "instance_template": "{{task}}",
            "step_limit": 5,
            "cost_limit": 0.0,
        },
        "model": {
            "model_class": "minisweagent.models.test_models.DeterministicModel",
            "model_name": "deterministic",
            "outputs": [
                says("hostname; id -u; echo content > answer.txt"),
                says("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"),
            ],
        },
    }
    path, trajectory = tmp_path / "config.yaml", tmp_path / "run.json"
    path.write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "minisweagent.run.mini",
        "-c",
        str(path),
        "-c",
        str(EXAMPLE),
        "-t",
        "Write a file.",
        "-o",
        str(trajectory),
    ]
    with Fleet("bwrap") as fleet:
        before = len(fleet.list())
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=_environment(tmp_path), stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(trajectory.read_text())
    assert run["info"]["exit_status"] == "Submitted"
    assert run["info"]["submission"] == "content\n"
    assert "sandbox\n0\n" in json.dumps(run["messages"]).replace("\\n", "\n")
    assert run["info"]["config"]["environment_type"] == CLASS
    with Fleet("bwrap") as fleet:
        assert len(fleet.list()) == before


def _environment(directory: Path) -> dict[str, str]:
    # Without a configuration of its own, the program would ask for one.
    return {**os.environ, "MSWEA_GLOBAL_CONFIG_DIR": str(directory), "MSWEA_CONFIGURED": "true"}
