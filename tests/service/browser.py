"""Parts of the tests of pages in a real Chromium: its arguments, a watched page, and texts that attack a page.

Chromium resolves no name but the one of the rebinding test, to 127.0.0.1. The fixtures are in `conftest.py`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from playwright.async_api import Page, expect

import holdfast.console
from tests.service.running_service import PATIENCE_SECONDS, RunningService, new_home, running_service

#: A name that an attacker's DNS lets resolve to this machine.
REBOUND: Final = "rebound.example"
ARGUMENTS: Final = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
MILLISECONDS: Final = PATIENCE_SECONDS * 1000

#: Records what a script of an attacker, or a mistake of the page's own, leaves behind.
WATCH: Final = """
  window.ran = [];
  window.violations = [];
  addEventListener("securitypolicyviolation", (event) =>
    violations.push(`${event.effectiveDirective} ${event.blockedURI} ${event.sample}`));
"""


@contextmanager
def service_with(rules: str) -> Iterator[RunningService]:
    """A service under these rules."""
    with new_home() as home:
        path = f"{home.directory}/rules.toml"
        with open(path, "w", encoding="utf-8") as file:
            file.write(rules)
        with running_service(home, "--rules", path) as service:
            yield service


class WatchedPage:
    """A page of a service, and everything that it did."""

    def __init__(self, page: Page, service: RunningService) -> None:
        self.page = page
        self.service = service
        self.requested: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(MILLISECONDS)
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("websocket", lambda socket: self.requested.append(socket.url.replace("ws:", "http:")))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    async def unharmed(self) -> None:
        """No script of an attacker ran, nothing was refused by the policy, no request went beyond the service."""
        ran, violations = await self.page.evaluate("() => [window.ran, window.violations]")
        assert (ran, violations, self.errors) == ([], [], [])
        assert [url for url in self.requested if not url.startswith((f"{self.service.http}/", "blob:"))] == []


#: Skips tests of the built page where npm could not build it.
built = pytest.mark.skipif(
    not os.path.exists(os.path.join(os.path.dirname(holdfast.console.__file__), "built", "index.html")),
    reason="no built console: `make console` needs npm",
)
#: The lines of a terminal, with those above the screen.
LINES: Final = """(element) => {
  const buffer = element.terminal.buffer.active;
  return Array.from({ length: buffer.length }, (_, at) => buffer.getLine(at).translateToString(true));
}"""


class Console(WatchedPage):
    """A page of the console."""

    def __init__(self, page: Page, service: RunningService) -> None:
        super().__init__(page, service)
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    async def enter(self, token: str, path: str = "/") -> None:
        await self.page.goto(f"{self.service.http}{path}")
        await self.page.fill("#token", token)
        await self.page.keyboard.press("Enter")
        await expect(self.page.locator("#leave")).to_be_visible()

    def terminal(self, name: str = "terminal") -> Any:
        return self.page.locator(f"[data-testid={name}]")

    async def lines(self, name: str = "terminal") -> list[str]:
        found: list[str] = await self.terminal(name).evaluate(LINES)
        return found

    async def draws(self, text: str, name: str = "terminal") -> None:
        """Wait until the terminal has a text, on its screen or above it."""
        await self.page.wait_for_function(
            """([name, text]) => {
              const buffer = document.querySelector(`[data-testid=${name}]`)?.terminal?.buffer.active;
              return buffer && Array.from({ length: buffer.length }, (_, at) =>
                buffer.getLine(at).translateToString(true)).some((line) => line.includes(text));
            }""",
            arg=[name, text],
        )


def new_session(service: RunningService, token: str, kind: str = "TERMINAL", **fields: Any) -> str:
    made: str = service.call("CreateSession", token, kind=kind, **fields)["sessionId"]
    return made


def type_text(service: RunningService, token: str, session: str, text: str) -> None:
    service.call("SendInput", token, sessionId=session, data=base64.b64encode(text.encode()).decode())


def kinds(service: RunningService, session: str) -> list[str]:
    return [each["kind"] for each in service.call("ListAudit", service.operator, sessionId=session)["records"]]


def attacks(canary: str) -> list[str]:
    """Texts that run a script or load something where they become markup or an address."""
    beacon = f"ran.push(1),fetch('{canary}/ran')"
    return [
        f'<img src=x onerror="{beacon}">',
        f"<script>{beacon}</script>",
        f'"><svg onload="{beacon}">',
        f'\'><iframe srcdoc="<script>parent.{beacon}</script>">',
        f"javascript:{beacon}",
        f'<a href="javascript:{beacon}">x</a>',
        f'<meta http-equiv=refresh content="0;url={canary}/refresh">',
        f'<base href="{canary}/"><link rel=stylesheet href="{canary}/style">',
        f"<style>@import url({canary}/import)</style><form action={canary}/form><button>",
        f"</title></script></pre></td><script src={canary}/script></script>",
        "<template><slot onslotchange=ran.push(1)></slot></template><details open ontoggle=ran.push(1)>",
        "${ran.push(1)}{{constructor.constructor('ran.push(1)')()}}",
    ]


def in_shell(text: bytes) -> str:
    """A command that prints `text`."""
    return "echo " + base64.b64encode(text).decode() + " | base64 -d"
