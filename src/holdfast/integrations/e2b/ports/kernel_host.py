"""A program that runs in a sandbox: a Jupyter kernel, driven by lines of JSON on stdin and stdout.

It needs `ipykernel` there, and is started by its source text, so that nothing has to be installed. A request is
`{"id", "code", "env"}` or `{"interrupt": id}`; events are `{"id", "event"}` with the lines of the code
interpreter's protocol, and `{"id", "end": true}` at last.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import time
from typing import Any

#: Keys of a result by the type of its data.
KEYS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}


def result_of(data: dict[str, Any], main: bool) -> dict[str, Any]:
    """The line of a displayed object."""
    line: dict[str, Any] = {"type": "result", "is_main_result": main}
    extra = {}
    for kind, value in data.items():
        if kind in KEYS:
            line[KEYS[kind]] = value
        else:
            extra[kind] = value
    line["extra"] = extra
    return line


def line_of(message: dict[str, Any]) -> dict[str, Any] | None:
    """The line of a message of the kernel; None for a message that has none."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        return {"type": content["name"], "text": content["text"], "timestamp": time.time_ns()}
    if kind in ("display_data", "update_display_data"):
        return result_of(content["data"], False)
    if kind == "execute_result":
        return result_of(content["data"], True)
    if kind == "error":
        trace = "\n".join(content["traceback"])
        return {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": trace}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


class Host:
    """The kernel and the requests that wait for it."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager  # type: ignore[import-not-found,unused-ignore]

        # Output of the kernel outside of an execution must not be among the events.
        self.events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self.lock = threading.Lock()
        self.requests: queue.Queue[dict[str, Any]] = queue.Queue()
        self.current: str | None = None
        self.withdrawn: set[str] = set()
        place = tempfile.mkdtemp(prefix="kernel-")
        self.manager = KernelManager(transport="ipc", ip=os.path.join(place, "k"), kernel_name="python3")
        self.manager.connection_file = os.path.join(place, "connection.json")
        with open(os.devnull, "r+b") as nothing:
            self.manager.start_kernel(stdin=nothing, stdout=nothing, stderr=nothing)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def send(self, message: dict[str, Any]) -> None:
        with self.lock:
            self.events.write(json.dumps(message) + "\n")
            self.events.flush()

    def run_silently(self, code: str) -> None:
        self.client.execute_interactive(code, silent=True, store_history=False, output_hook=lambda _: None)

    def run(self, request: dict[str, Any]) -> None:
        id, env = request["id"], request.get("env") or {}

        def shown(message: dict[str, Any]) -> None:
            line = line_of(message)
            if line is not None:
                self.send({"id": id, "event": line})

        if env:
            before = "import os as _e; _e_before = {k: _e.environ.get(k) for k in %r}; _e.environ.update(%r)"
            self.run_silently(before % (list(env), env))
        try:
            self.client.execute_interactive(request["code"], allow_stdin=False, output_hook=shown)
        finally:
            if env:
                after = "[_e.environ.pop(k, None) if v is None else _e.environ.update({k: v}) for k, v in "
                self.run_silently(after + "_e_before.items()]; del _e, _e_before")

    def work(self) -> None:
        while True:
            request = self.requests.get()
            id = request["id"]
            with self.lock:
                self.current = id
                withdrawn = id in self.withdrawn
                self.withdrawn.discard(id)
            try:
                if not withdrawn:
                    self.run(request)
            except Exception as error:  # noqa: BLE001 - the client gets it, and the next request runs
                failed = {"type": "error", "name": type(error).__name__, "value": str(error), "traceback": ""}
                self.send({"id": id, "event": failed})
                if not self.manager.is_alive():
                    os._exit(1)
            with self.lock:
                self.current = None
            self.send({"id": id, "end": True})

    def interrupt(self, id: str) -> None:
        with self.lock:
            running = self.current == id
            if not running:
                self.withdrawn.add(id)
        if running:
            self.manager.interrupt_kernel()


def main() -> None:
    host = Host()
    threading.Thread(target=host.work, daemon=True).start()
    host.send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "interrupt" in request:
            host.interrupt(request["interrupt"])
        else:
            host.requests.put(request)
    host.manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
