"""`inspect eval` with a scripted model: Inspect's tools, `exec_remote` and the agent bridge in our sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, EvalSample, list_eval_logs, read_eval_log
from inspect_ai.model import ChatMessageTool

TASKS = Path(__file__).parent / "tasks.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EvalLog]:
    directory = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-m", "inspect_ai", "eval", TASKS.name, "--log-dir", str(directory)]
    done = subprocess.run(
        [*command, "--display", "plain", "--no-fail-on-error"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=TASKS.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [read_eval_log(info) for info in list_eval_logs(str(directory))]
    return {log.eval.task.rpartition("/")[2]: log for log in found}


def _sample(logs: dict[str, EvalLog], name: str) -> EvalSample:
    log = logs[name]
    assert log.status == "success", log.error
    assert log.samples
    assert log.samples[0].error is None, log.samples[0].error
    return log.samples[0]


def test_tools(logs: dict[str, EvalLog]) -> None:
    messages = [each for each in _sample(logs, "tools").messages if isinstance(each, ChatMessageTool)]
    assert [each.error for each in messages] == [None] * 7
    texts = [each.text for each in messages]
    assert texts[0] == "a file of the sample\nroot\n"
    assert texts[1] == "42\n"
    assert "/tmp:yes" in texts[3]
    assert texts[6] == "changed by the editor\n"


def test_example(logs: dict[str, EvalLog]) -> None:
    sample = _sample(logs, "example")
    assert [each.text for each in sample.messages if isinstance(each, ChatMessageTool)] == ["3\n"]
    assert sample.scores is not None
    assert [score.value for score in sample.scores.values()] == ["C"]


def test_exec_remote(logs: dict[str, EvalLog]) -> None:
    text, ended, code, seconds = json.loads(_sample(logs, "remote").store["remote"])
    assert (text, ended, code) == ("out\n", [3], 0)
    print(f"exec_remote took {seconds} s")


def test_agent_bridge(logs: dict[str, EvalLog]) -> None:
    assert _sample(logs, "bridge").store["bridge"] == "an answer from outside\n"
