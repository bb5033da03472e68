"""A `kubectl` for tests, over any command that runs commands: a test writes down its pod and its faults.

`get pod` prints the pod that the test wrote; `exec` runs the command and behaves as the real one does where that
matters: it does not end while the command has left input unread.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

#: The real one's message for a container that is being created or restarted.
NOT_FOUND = 'error: Internal error occurred: unable to upgrade connection: container not found ("app")'

_SCRIPT = r"""
import json, os, select, subprocess, sys

home, prefix = {home!r}, {prefix!r}


def note(words):
    with open(home + "/calls", "a") as calls:
        calls.write("\0".join(words) + "\x1e")


def fail(text):
    sys.stderr.write(text + "\n")
    sys.exit(1)


note(sys.argv[1:])
if "gone" in sys.argv:
    fail('Error from server (NotFound): pods "gone" not found')
fault = None
try:
    with open(home + "/faults") as file:
        faults = json.load(file)
except FileNotFoundError:
    faults = []
command = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
if faults and any(faults[0]["when"] in word for word in command):
    fault = faults.pop(0)
    with open(home + "/faults.new", "w") as file:
        json.dump(faults, file)
    os.rename(home + "/faults.new", home + "/faults")
if "get" in sys.argv:
    if os.path.exists(home + "/get-fails"):
        fail(open(home + "/get-fails").read())
    try:
        with open(home + "/pod") as file:
            pod = file.read()
    except FileNotFoundError:
        fail('Error from server (NotFound): pods "web" not found')
    sys.stdout.write(pod)
    sys.exit(0)
if not command:
    sys.exit("kubectl: neither get nor exec")
if fault and fault["do"] == "refuse":
    fail(fault["words"])
# When the connection breaks in the midst of the input, the command inside sees the end of its input, and what it
# prints afterwards does not arrive.
kept = fault["bytes"] if fault else None
stdout = subprocess.DEVNULL if fault and not fault["heard"] else None
child = subprocess.Popen([*prefix, *command], stdin=subprocess.PIPE, stdout=stdout, bufsize=0)
unread, write = os.pipe()
source = 0
alive = True
passed = 0
while True:
    if alive and child.poll() is not None:
        alive = False
    ready = select.select([source], [], [], 0.01 if alive else 0)[0]
    if not ready:
        if not alive:
            break
        continue
    data = os.read(source, 65536 if kept is None else min(65536, kept - passed))
    if not data:
        break
    passed += len(data)
    try:
        os.write(child.stdin.fileno(), data)
    except BrokenPipeError:
        # Nothing reads: the real one has a pipe on the other side that fills up, and then does not end.
        os.write(write, data)
child.stdin.close()
code = child.wait()
if kept is not None:
    if fault["exit_code"]:
        sys.stderr.write("error: unexpected EOF\n")
    sys.exit(fault["exit_code"])
if code:
    sys.stderr.write("command terminated with exit code %d\n" % code)
sys.exit(code)
"""


class Kubectl:
    """The program in `directory`, and the cluster behind it: one pod, `team/web`, with the container `app`."""

    def __init__(self, directory: Path, prefix: Sequence[str]) -> None:
        self.home = directory
        self.program = directory / "bin/kubectl"
        self.program.parent.mkdir()
        script = _SCRIPT.replace("{home!r}", repr(str(directory))).replace("{prefix!r}", repr(list(prefix)))
        (directory / "kubectl.py").write_text(script)
        self.program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {directory}/kubectl.py "$@"\n')
        self.program.chmod(0o755)
        self.pod()

    @property
    def calls(self) -> list[list[str]]:
        path = self.home / "calls"
        text = path.read_text() if path.exists() else ""
        return [line.split("\0") for line in text.split("\x1e") if line]

    @property
    def looks(self) -> int:
        """How often the pod was queried."""
        return sum("get" in call for call in self.calls)

    def breaks_get(self, words: str) -> None:
        """`get` fails with these words from now on."""
        (self.home / "get-fails").write_text(words)

    def pod(
        self,
        *,
        uid: str = "uid-1",
        phase: str = "Running",
        policy: str = "Always",
        ready: bool = True,
        deleting: bool = False,
        state: Literal["waiting", "running", "terminated"] = "running",
        **detail: Any,
    ) -> None:
        """The output of `get pod` from now on; `detail` is about the container's state."""
        made = pod_object(
            uid=uid, phase=phase, policy=policy, ready=ready, deleting=deleting, state=state, detail=detail
        )
        new = self.home / "pod.new"
        new.write_text(json.dumps(made))
        new.rename(self.home / "pod")

    def remove_pod(self) -> None:
        (self.home / "pod").unlink()

    def refuse(self, *words: str, when: str = "") -> None:
        """The next calls of `exec` (of commands that contain `when`) fail with these words."""
        self._fault([{"do": "refuse", "words": each, "when": when} for each in words])

    def cut(self, *, after: int, exit_code: int, when: str, times: int = 1, heard: bool = False) -> None:
        """The next commands that contain `when` get so many bytes of their input, and kubectl has this exit code.

        Their output is lost, unless `heard` is set.
        """
        fault = {"do": "cut", "bytes": after, "exit_code": exit_code, "when": when, "heard": heard}
        self._fault([fault] * times)

    def _fault(self, faults: list[dict[str, Any]]) -> None:
        (self.home / "faults").write_text(json.dumps(faults))

    @property
    def faults_left(self) -> int:
        path = self.home / "faults"
        return len(json.loads(path.read_text())) if path.exists() else 0


def pod_object(
    *,
    uid: str = "uid-1",
    phase: str = "Running",
    policy: str = "Always",
    ready: bool = True,
    deleting: bool = False,
    state: str = "running",
    detail: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The API's object, with the fields that are read and some that are not."""
    metadata: dict[str, Any] = {"name": "web", "namespace": "team", "uid": uid, "labels": {"app": "web"}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    side = {"name": "side", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    status = {
        "name": "app",
        "ready": ready and state == "running",
        "restartCount": 0,
        "state": {state: detail or {}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": policy,
            "containers": [{"name": "app", "image": "x"}, {"name": "side", "image": "y"}],
        },
        "status": {"phase": phase, "containerStatuses": [side, status]},
    }
