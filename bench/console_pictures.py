"""Takes the pictures of the console that the docs show: a real service, real programs, a real Chromium.

`python -m bench.console_pictures DIRECTORY` writes PNG files; `--all` takes every page at three widths, in light
and in dark. Touches a temporary directory and the pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import shutil
import threading
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
"""
PROGRAM: Final = 'def main() -> int:\n    """Return the answer."""\n    return 42\n\n\nraise SystemExit(main())\n'
EDIT: Final = "vim -N -u NONE -c 'syntax on' -c 'set number background=dark' app.py\r"
BUILD: Final = (
    "ls --color=always -la /usr/lib | head -9",
    "python3 -c 'import json; print(json.loads(\"{\"))' 2>&1 | tail -2; false",
    "for each in parse check link; do printf '\\033[32mok\\033[0m    %s\\n' $each; sleep 0.4; done",
)
#: Shorter in a prompt than a temporary directory.
WORKSPACES: Final = "/tmp/agents"
#: The pictures of the docs: page, width, height, colours.
SHOWN: Final = (
    ("sessions", 1280, 620, "light"),
    ("session", 1280, 760, "dark"),
    ("approvals", 1280, 620, "light"),
    ("wall", 1280, 620, "dark"),
)
SIZES: Final = ((360, 740), (1280, 800), (2560, 1300))


class Scene:
    """Sessions of some agents that do something to look at."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.tokens = {name: _new_agent(service.home, name) for name in ("builder", "reviewer", "tester")}
        self.calls: list[threading.Thread] = []

    def open(self, agent: str, kind: str = "TERMINAL", **labels: str) -> str:
        fields = {"kind": kind, "labels": labels, "cols": 100, "rows": 30}
        made: str = self.service.call("CreateSession", self.tokens[agent], **fields)["sessionId"]
        return made

    def run(self, agent: str, session: str, command: str) -> None:
        self.service.post("RunCommand", self.tokens[agent], sessionId=session, command=command, timeoutMs=60_000)

    def later(self, agent: str, session: str, command: str) -> None:
        """Run a command that waits for an approval."""
        call = threading.Thread(target=self.run, args=(agent, session, command))
        call.start()
        self.calls.append(call)

    def type(self, agent: str, session: str, text: str) -> None:
        data = base64.b64encode(text.encode()).decode()
        self.service.call("SendInput", self.tokens[agent], sessionId=session, data=data)

    def play(self) -> dict[str, str]:
        """Start everything; return the paths of the pages."""
        edits, top = self.open("builder", task="17", repo="api"), self.open("reviewer", task="18")
        build, tests = self.open("builder", task="17", repo="web"), self.open("tester", suite="unit")
        shell = self.open("tester", "SHELL", suite="lint")
        self.run("builder", edits, f"printf '%s' '{PROGRAM}' > app.py")
        self.type("builder", edits, EDIT)
        self.type("reviewer", top, "htop\r")
        for command in BUILD:
            self.run("builder", build, command)
        self.type("tester", tests, "seq -f 'test %g passed' 300; sleep 600\r")
        for command in ("echo checked 41 files", "ls /nonexistent; echo after", "printf 'c\\na\\nb\\n' | sort"):
            self.run("tester", shell, command)
        for number in range(4):
            ended = self.open("reviewer", "SHELL", task=str(number))
            self.run("reviewer", ended, f"sh -c 'exit {number}'")
            self.service.call("CloseSession", self.tokens["reviewer"], sessionId=ended)
        self.later("tester", shell, "rm -rf build/ dist/ && echo cleaned")
        self.later("builder", build, "git push --force origin main")
        return {
            "sessions": "/sessions",
            "wall": "/wall",
            "session": f"/sessions/{build}",
            "editor": f"/sessions/{edits}",
            "top": f"/sessions/{top}",
            "shell": f"/sessions/{shell}",
            "replay": f"/sessions/{build}?at=2",
            "approvals": "/approvals",
            "audit": "/audit",
            "fleet": "/fleet",
            "usage": "/usage",
            "nothing": "/sessions?q=nothing",
        }

    def end(self) -> None:
        for each in self.service.call("ListApprovals", self.service.operator)["approvals"]:
            self.service.post("AnswerApproval", self.service.operator, approvalId=each["approvalId"], approve=False)
        for call in self.calls:
            call.join()


def _write_rules(path: str) -> None:
    with open(path, "w") as file:
        file.write(f'workspaces = "{WORKSPACES}"\n{RULES}')


def _new_agent(home: ServiceHome, name: str) -> str:
    return home.holdfast("service", "agent", "add", name).stdout.strip()


async def take(browser: Browser, service: RunningService, path: str, picture: tuple[Any, ...], file: str) -> None:
    _, width, height, colours = picture
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
    page = await context.new_page()
    await page.goto(f"{service.http}{path}")
    await page.fill("#token", service.operator)
    await page.keyboard.press("Enter")
    await page.wait_for_selector("main")
    await page.wait_for_load_state("networkidle")
    # Screens are drawn and thumbnails fetched some moments after the last request.
    await page.wait_for_timeout(3_500)
    await page.screenshot(path=file)
    await context.close()
    print(file)


async def pictures(directory: str, every: bool) -> None:
    os.makedirs(directory, exist_ok=True)
    with new_home() as home:
        rules = os.path.join(home.directory, "rules.toml")
        await asyncio.to_thread(_write_rules, rules)
        with running_service(home, "--rules", rules, HOLDFAST_SERVICE_MONITOR_INTERVAL="1") as service:
            scene = Scene(service)
            paths = await asyncio.to_thread(scene.play)
            everything = [(n, w, h, c) for c in ("light", "dark") for w, h in SIZES for n in paths]
            async with async_playwright() as driver:
                browser = await driver.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--disable-gpu"], chromium_sandbox=False
                )
                for picture in everything if every else SHOWN:
                    name, width, _, colours = picture
                    ending = f"-{width}-{colours}" if every else ""
                    path = os.path.join(directory, f"console-{name}{ending}.png")
                    await take(browser, service, paths[name], picture, path)
                await browser.close()
            await asyncio.to_thread(scene.end)
    shutil.rmtree(WORKSPACES, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--all", action="store_true", help="every page, at three widths, light and dark")
    arguments = parser.parse_args()
    asyncio.run(pictures(arguments.directory, arguments.all))


if __name__ == "__main__":
    main()
