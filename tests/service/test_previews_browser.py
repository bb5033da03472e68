"""Previews in a real Chromium: pages of two sessions, each of which attacks the other.

Chromium resolves names below `localhost` to this machine, and no other name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest
from playwright.async_api import Page, async_playwright

from holdfast.service.api import Preview
from holdfast.service.assembly import ServiceReplica
from tests.service.test_previews import BOB, opened, preview, service, settings, without_ticket
from tests.support.parts import needs

__all__ = ["service", "settings"]
pytestmark = [needs("chromium"), needs("bwrap")]

ARGUMENTS: Final = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP *.localhost 127.0.0.1, MAP localhost 127.0.0.1, MAP * ~NOTFOUND",
]
#: Opens a WebSocket, and returns the first message or `refused`.
SOCKET: Final = """url => new Promise(resolve => {
  const socket = new WebSocket(url.replace("http", "ws"));
  socket.onopen = () => socket.send("hello");
  socket.onmessage = event => { resolve(event.data.split(" ")[0]); socket.close(); };
  socket.onerror = () => resolve("refused");
})"""
#: Makes a request whose response a page of another origin may not read, and returns its text or the error.
FETCH: Final = """([url, options]) => fetch(url, {credentials: "include", ...options}).then(
  reply => reply.type === "opaque" ? "opaque" : reply.text(), error => error.name)"""


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        # As root, as in a container, Chromium has no sandbox of its own; the profile is new and empty.
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=ARGUMENTS, chromium_sandbox=False
        )
        yield await browser.new_page()
        await browser.close()


def at(made: Preview, path: str) -> tuple[str, str]:
    """Both URLs of a page of a preview, with the ticket."""
    own, shared = (url.replace("/?", f"/{path}?") for url in (made.url, made.path_url))
    return own, shared


async def test_pages_of_previews_have_no_secret_and_do_not_reach_each_other(
    service: ServiceReplica, page: Page
) -> None:
    mine = await preview(service, await opened(service))
    theirs = await preview(service, await opened(service, BOB), BOB)
    seen: list[str] = []
    page.on("framenavigated", lambda frame: seen.append(frame.url))
    # The browser has the cookies of both previews, in both forms.
    for url in (*at(theirs, "page"), *at(mine, "page")):
        await page.goto(url)
        assert await page.title() == "hostile"
        assert "ticket" not in page.url

    # The last page is that below the path: it has no origin, no cookies and no storage.
    assert await page.evaluate("origin") == "null"
    for expression in ("document.cookie", "localStorage.length", "indexedDB.open('x')"):
        assert await page.evaluate(f"() => {{ try {{ {expression}; return '' }} catch (e) {{ return e.name }} }}")
    await attack(page, theirs)

    own, _ = at(mine, "page")
    await page.goto(own)
    assert "holdfast" not in await page.evaluate("document.cookie")
    assert await page.evaluate(SOCKET, without_ticket(mine.url)) == "hello"
    assert '"path": "/data"' in await page.evaluate(FETCH, ["/data", {"method": "POST"}])
    await attack(page, theirs)
    assert not any("ticket" in url for url in seen)
    await page.goto(at(theirs, "data")[0])
    assert '"posts": 0' in await page.inner_text("body")


async def attack(page: Page, theirs: Preview) -> None:
    """From the page, try to read or change something in the preview of another session."""
    for url in map(without_ticket, (theirs.url, theirs.path_url)):
        assert await page.evaluate(SOCKET, url) == "refused"
        for options in ({}, {"method": "POST"}, {"method": "POST", "mode": "no-cors"}):
            assert await page.evaluate(FETCH, [url, options]) in ("TypeError", "opaque"), (url, options)
