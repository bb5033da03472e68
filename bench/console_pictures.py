"""Takes the pictures of the console that the docs show: a real service, real programs, a real Chromium.

`python -m bench.console_pictures DIRECTORY` writes PNG files; `--all` takes every page at three widths, in light
and in dark, and `--only NAME...` some of them. Touches a temporary directory and the pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any, Final

from playwright.async_api import Browser, async_playwright

from tests.service.running_service import RunningService, ServiceHome, new_home, running_service

RULES: Final = """
[profiles.default.commands]
rules = [
  { verdict = "ask", program = "git", arguments = ["push"], reason = "pushes leave the sandbox" },
  { verdict = "ask", program = "rm", reason = "removals are reviewed" },
  { verdict = "deny", program = "nc" },
]

[profiles.default.sandbox]
engines = ["bwrap", "docker"]
pools = ["builders"]

[pools.builders]
engine = "bwrap"
warm = 2
max = 8
"""
PROGRAM: Final = 'def main() -> int:\n    """Return the answer."""\n    return 42\n\n\nraise SystemExit(main())\n'
EDIT: Final = "vim -n -N -u NONE -c 'syntax on' -c 'set number background=dark' app.py\r"
BUILD: Final = (
    "ls --color=always -la /usr/lib | head -9",
    "python3 -c 'import json; print(json.loads(\"{\"))' 2>&1 | tail -2; false",
    "for each in parse check link; do printf '\\033[32mok\\033[0m    %s\\n' $each; sleep 0.4; done",
)
#: Shorter in a prompt than a temporary directory.
WORKSPACES: Final = "/tmp/agents"
#: The pictures of the docs: page, width, height, colours.
SHOWN: Final = (
    ("sessions", 1280, 560, "light"),
    ("session", 1280, 760, "dark"),
    ("approvals", 1280, 720, "light"),
    ("wall", 1280, 720, "dark"),
)
#: True when every terminal and every thumbnail has been drawn.
DRAWN: Final = """() => !document.querySelector(".skeleton") &&
  Array.from(document.querySelectorAll(".xterm-rows")).every((rows) => rows.textContent.trim()) &&
  Array.from(document.querySelectorAll(".over-canvas")).every((note) => note.textContent !== "Drawing…")"""
#: Keys that open a dialog before the picture.
PRESSED: Final = {"help": ["?"], "search": ["Control+k"]}
SIZES: Final = ((360, 740), (1280, 800), (2560, 1300))


class Scene:
    """Sessions of some agents that do something to look at."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.tokens = {name: _new_agent(service.home, name) for name in ("builder", "reviewer", "tester")}

    def open(self, agent: str, kind: str = "TERMINAL", sandbox: str = "", **labels: str) -> str:
        fields = {"kind": kind, "labels": labels, "cols": 100, "rows": 30, "sandbox": sandbox}
        made: str = self.service.call("CreateSession", self.tokens[agent], **fields)["sessionId"]
        return made

    def run(self, agent: str, session: str, command: str) -> None:
        self.service.post("RunCommand", self.tokens[agent], sessionId=session, command=command, timeoutMs=60_000)

    def model_calls(self, agent: str, session: str, count: int) -> None:
        """Record calls as a bridge's owner does."""
        now = time.time()
        calls = [
            {
                "callId": f"call-{number}",
                "startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 7 * (count - number))),
                "model": "claude-sonnet-4-5" if number % 5 else "claude-haiku-4-5",
                "path": "/v1/messages",
                "status": 529 if number == 6 else 200,
                "inputTokens": 0 if number == 6 else 9_000 + 431 * number,
                "outputTokens": 0 if number == 6 else 120 + 37 * (number % 11),
                "money": 0 if number == 6 else 0.031 + 0.0017 * number,
                "durationSeconds": 1.4 + 0.3 * (number % 7),
            }
            for number in range(1, count + 1)
        ]
        self.service.call("RecordModelCalls", self.tokens[agent], sessionId=session, calls=calls)

    def type(self, agent: str, session: str, text: str) -> None:
        data = base64.b64encode(text.encode()).decode()
        self.service.call("SendInput", self.tokens[agent], sessionId=session, data=data)

    def middle(self, session: str) -> float:
        """The moment of a recording at which half of its output is on the screen."""
        events = self.service.call("ReadRecording", self.service.operator, sessionId=session)["events"]
        return float(events[len(events) // 2]["time"])

    def play(self) -> dict[str, str]:
        """Start everything; return the paths of the pages."""
        edits, top = self.open("builder", task="17", repo="api"), self.open("reviewer", task="18")
        build, tests = self.open("builder", task="17", repo="web"), self.open("tester", suite="unit")
        shell = self.open("tester", "SHELL", suite="lint")
        pooled = self.open("builder", "SHELL", "pool:builders", task="19")
        self.run("builder", pooled, "uname -sr")
        self.run("builder", edits, f"printf '%s' '{PROGRAM}' > app.py")
        self.type("builder", edits, EDIT)
        self.type("reviewer", top, "htop\r")
        for command in BUILD:
            self.run("builder", build, command)
        self.model_calls("builder", build, 41)
        self.type("tester", tests, "seq -f 'test %g passed' 300; sleep 600\r")
        for command in ("echo checked 41 files", "ls /nonexistent; echo after", "printf 'c\\na\\nb\\n' | sort"):
            self.run("tester", shell, command)
        for number in range(4):
            ended = self.open("reviewer", "SHELL", task=str(number))
            self.run("reviewer", ended, f"sh -c 'exit {number}'")
            self.service.call("CloseSession", self.tokens["reviewer"], sessionId=ended)
        # Input that waits for an approval holds no call.
        self.type("tester", shell, "rm -rf build/ dist/ && echo cleaned\n")
        self.type("builder", build, "git push --force origin main\r")
        return {
            "sessions": "/sessions",
            "wall": "/wall",
            "session": f"/sessions/{build}",
            "editor": f"/sessions/{edits}",
            "top": f"/sessions/{top}",
            "shell": f"/sessions/{shell}",
            "replay": f"/sessions/{build}?at={self.middle(build):.1f}",
            "ended": f"/sessions/{ended}",
            "approvals": "/approvals",
            "audit": "/audit",
            "fleet": "/fleet",
            "usage": "/usage",
            "nothing": "/sessions?q=nothing",
            "missing": "/sessions/ses-unknown",
            "help": "/sessions",
            "search": "/sessions",
            "sign-in": "/sessions",
        }


def _write_rules(path: str) -> None:
    with open(path, "w") as file:
        file.write(f'workspaces = "{WORKSPACES}"\n{RULES}')


def _new_agent(home: ServiceHome, name: str) -> str:
    return home.holdfast("service", "agent", "add", name).stdout.strip()


def _close_sessions(service: RunningService) -> None:
    """Close every session, so that the sandboxes of the pool are removed with it."""
    for session in service.call("ListSessions", service.operator)["sessions"]:
        service.call("CloseSession", service.operator, sessionId=session["metadata"]["sessionId"], mode="FORCE")


async def take(browser: Browser, service: RunningService, path: str, picture: tuple[Any, ...], file: str) -> None:
    name, width, height, colours = picture
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
    page = await context.new_page()
    if name != "sign-in":
        await page.goto(f"{service.http}/plain")
        await page.evaluate("(token) => sessionStorage.setItem('holdfast-token', token)", service.operator)
    await page.goto(f"{service.http}{path}")
    await page.wait_for_selector("#token" if name == "sign-in" else "main")
    for key in PRESSED.get(name, ()):
        await page.keyboard.press(key)
    # The last frame of a page is painted some moments after its last request.
    await page.wait_for_timeout(2_500)
    await page.wait_for_function(DRAWN, timeout=60_000)
    await page.wait_for_timeout(500)
    await page.screenshot(path=file)
    await context.close()
    print(file)


async def take_all(
    service: RunningService, paths: dict[str, str], chosen: Sequence[tuple[Any, ...]], to: Any
) -> None:
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--disable-gpu"], chromium_sandbox=False
        )
        one_at_a_time = asyncio.Semaphore(3)

        async def each(picture: tuple[Any, ...]) -> None:
            async with one_at_a_time:
                await take(browser, service, paths[picture[0]], picture, to(picture))

        await asyncio.gather(*(each(picture) for picture in chosen))
        await browser.close()


async def pictures(directory: str, every: bool, only: Sequence[str]) -> None:
    os.makedirs(directory, exist_ok=True)
    shutil.rmtree(WORKSPACES, ignore_errors=True)
    with new_home() as home:
        rules = os.path.join(home.directory, "rules.toml")
        await asyncio.to_thread(_write_rules, rules)
        # Else the pool would take over a sandbox of a service on this machine.
        home.environ["HOLDFAST_FLEET_DIRECTORY"] = os.path.join(home.directory, "f")
        await asyncio.to_thread(os.mkdir, home.environ["HOLDFAST_FLEET_DIRECTORY"], 0o711)
        with running_service(home, "--rules", rules, HOLDFAST_SERVICE_MONITOR_INTERVAL="1") as service:
            paths = await asyncio.to_thread(Scene(service).play)
            everything = [(n, w, h, c) for c in ("light", "dark") for w, h in SIZES for n in paths]
            chosen = [each for each in (everything if every else SHOWN) if not only or each[0] in only]

            def file(picture: tuple[Any, ...]) -> str:
                ending = f"-{picture[1]}-{picture[3]}" if every else ""
                return os.path.join(directory, f"console-{picture[0]}{ending}.png")

            try:
                await take_all(service, paths, chosen, file)
            finally:
                await asyncio.to_thread(_close_sessions, service)
    shutil.rmtree(WORKSPACES, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--all", action="store_true", help="every page, at three widths, light and dark")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these pages")
    arguments = parser.parse_args()
    asyncio.run(pictures(arguments.directory, arguments.all, arguments.only))


if __name__ == "__main__":
    main()
