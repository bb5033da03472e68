"""Pages of the built console in a real Chromium: lists, wall, fleet, usage, models, audit; widths and contrast."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
from playwright.async_api import expect

from tests.service.browser import WATCH, Console, attacks, built, kinds, new_session, service_with, type_text
from tests.service.running_service import RunningService
from tests.support.fake_provider import fake_provider
from tests.support.parts import needs

pytestmark = [needs("chromium"), built, pytest.mark.asyncio(loop_scope="module")]
RULES: Final = """
[profiles.default.commands]
rules = [{ verdict = "ask", program = "rm", reason = "removals are reviewed" }]

[profiles.default.sandbox]
engines = ["local"]
pools = ["warm"]

[pools.warm]
engine = "local"
warm = 1
max = 3
"""
PAGES: Final = ("/sessions", "/wall", "/fleet", "/approvals", "/audit", "/usage")

#: Texts whose contrast with the background behind them is below AA: 4.5, or 3 for large ones.
CONTRAST: Final = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const background = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(each).backgroundColor);
      if (a === 1) return [r, g, b];
      if (a > 0) return null;  // a blend, as under a dialog
    }
    return null;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const texts = Array.from(element.childNodes).filter((each) => each.nodeType === 3);
    const text = texts.map((each) => each.data).join("").trim();
    const style = getComputedStyle(element);
    if (!text || !element.checkVisibility() || element.closest(".xterm, .over-canvas, canvas, noscript")) continue;
    const back = background(element);
    if (!back) continue;
    const [one, other] = [luminance(channels(style.color)), luminance(back)].sort((a, b) => a - b);
    const ratio = (other + 0.05) / (one + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) found.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with service_with(RULES) as service:
        yield service


@pytest.fixture(scope="module")
def agent(service: RunningService) -> str:
    return service.home.new_agent("builder")


@pytest.fixture(scope="module")
def other_agent(service: RunningService) -> str:
    return service.home.new_agent("aaron")


def call_record(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "callId": f"call-{number}",
        "startedAt": "2026-01-01T00:00:00Z",
        "model": "small",
        "path": "/v1/messages",
        "status": 200,
        "inputTokens": 1000,
        "outputTokens": 50,
        "money": 0.25,
        "durationSeconds": 1.5,
        **fields,
    }


async def test_model_calls_are_in_the_session_in_the_usage_and_in_the_audit(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL")
    hostile = attacks("http://127.0.0.1:9")[0]
    calls = [call_record(1), call_record(2, status=529, inputTokens=0), call_record(3, model=hostile)]
    # A retry adds nothing.
    for _ in range(2):
        service.call("RecordModelCalls", agent, sessionId=session, calls=calls)
    found = service.call("ListModelCalls", agent, sessionId=session)
    assert [each["callId"] for each in found["calls"]] == ["call-3", "call-2", "call-1"]
    assert {each["model"]: (each["calls"], each.get("failed", "0")) for each in found["totals"]} == {
        "small": ("2", "1"),
        hostile: ("1", "0"),
    }
    await console.enter(service.operator, f"/sessions/{session}")
    await expect(console.page.locator(".overview")).to_contain_text("3 calls · 2.1k tokens · cost 0.75")
    await console.page.get_by_role("tab", name="Models").click()
    await expect(console.page.locator(".model-calls li")).to_have_count(3)
    await expect(console.page.locator(".model-calls")).to_contain_text("✗ 529")
    await expect(console.page.locator(".models")).to_contain_text(hostile[:60])
    await console.page.goto(f"{service.http}/usage")
    await expect(console.page.locator(".models tbody tr")).to_have_count(2)
    await console.page.goto(f"{service.http}/audit?session={session}&kind=models")
    words = "builder called small, 1.0k tokens in, 50 out, cost 0.25"
    await expect(console.page.locator(".audit")).to_contain_text(words)
    await console.unharmed()


AGENT: Final = """
import json, os, urllib.request
for model in ("small", "unauthorized"):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "a question"}]}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, body, {"content-type": "application/json"})
    try:
        print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        print(error.code)
"""


async def test_calls_of_a_real_bridge_are_in_the_session(
    console: Console, service: RunningService, agent: str
) -> None:
    """`holdfast bridge --session`: an agent in a sandbox, a provider on loopback, and the page while it is open."""
    session = new_session(service, agent, kind="SHELL")
    await console.enter(service.operator, f"/sessions/{session}")
    await expect(console.page.locator(".overview")).to_contain_text("Policy")
    # 10 tokens in and 5 out, at these prices for a million. The calls of the second bridge change nothing else that
    # the page shows of the session.
    for shown in ("2 calls · 15 tokens · cost 0.02", "4 calls · 30 tokens · cost 0.04"):
        async with fake_provider() as provider:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdfast", "bridge", "--session", session, "--port", "0"),
                *("--upstream", provider.url, "--key-env", "KEY", "--price", "small=1000/2000"),
                *("--", sys.executable, "-c", AGENT),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={
                    **service.home.environ,
                    "KEY": "sk-of-the-host-0123456789",
                    "HOLDFAST_SERVICE_ADDRESS": service.grpc,
                    "HOLDFAST_SERVICE_TOKEN": agent,
                },
            )
            printed, complaints = await process.communicate()
        assert (process.returncode, printed, complaints) == (0, b"hello\n401\n", b"")
        assert [each.json["model"] for each in provider.requested] == ["small", "unauthorized"]
        await expect(console.page.locator(".overview")).to_contain_text(shown)
    await console.page.get_by_role("tab", name="Models").click()
    await expect(console.page.locator(".model-calls li")).to_have_count(4)
    await expect(console.page.locator(".model-calls")).to_contain_text("✗ 401")
    await expect(console.page.locator(".models")).to_contain_text("small")
    await console.unharmed()


@pytest.mark.parametrize("kind", ["TERMINAL", "SHELL"])
async def test_the_page_of_a_session_whose_sandbox_is_gone(
    console: Console, service: RunningService, agent: str, kind: str
) -> None:
    session = new_session(service, agent, kind=kind, sandbox="local:new")
    service.call("RunCommand", agent, sessionId=session, command="echo still $((6*7)) known")
    await console.enter(service.operator, f"/sessions/{session}")
    sandbox = service.call("GetSession", agent, sessionId=session)["metadata"]["sandbox"]
    removed = await asyncio.to_thread(service.home.holdfast, "sandbox", "rm", sandbox.removeprefix("local:"))
    assert removed.returncode == 0, removed.stderr
    # CLOSED if the service read the exit of the shell before the end of the sandbox.
    await expect(console.page.locator(".session-head .state")).to_have_text(re.compile("CLOSED|ERROR"))
    await console.page.reload()
    await expect(console.page.locator("main")).to_contain_text("The sandbox of this session is gone")
    await expect(console.page.locator(".session-head ~ .notice")).to_contain_text(
        re.compile(r"^(Closed|Failed) [\d:]+: [a-z]")
    )
    await expect(console.page.locator(".commands code")).to_have_text("echo still $((6*7)) known")
    if kind == "TERMINAL":
        await expect(console.terminal()).to_be_hidden()
        await expect(console.page.locator(".terminal-box")).to_contain_text(
            "there is no such sandbox (SANDBOX_GONE)"
        )
        await console.page.goto(f"{service.http}/sessions/{session}?at=0")
        await expect(console.page.locator(".terminal-box")).to_contain_text("There is no recording any more")
    else:
        await expect(console.page.locator(".block pre")).to_have_text("still 42 known\n")
    # The service answers: nothing on the page is stale.
    await expect(console.page.locator("div.away")).to_have_count(0)
    await console.unharmed()


async def test_model_calls_belong_to_their_session(service: RunningService, agent: str) -> None:
    theirs = new_session(service, service.operator, kind="SHELL")
    assert service.post("RecordModelCalls", agent, sessionId=theirs, calls=[call_record(1)])[0] == 404
    assert service.post("ListModelCalls", agent, sessionId=theirs)[0] == 404
    assert service.post("ListModelCalls", agent)[0] == 403
    mine = new_session(service, agent, kind="SHELL")
    for wrong in ({"callId": ""}, {"money": -1}, {"money": "NaN"}, {"model": "a\nb"}, {"model": "x" * 300}):
        assert service.post("RecordModelCalls", agent, sessionId=mine, calls=[call_record(1, **wrong)])[0] == 400
    many = [call_record(number) for number in range(101)]
    assert service.post("RecordModelCalls", agent, sessionId=mine, calls=many)[0] == 400
    assert "model_call" not in kinds(service, mine)
    service.call("CloseSession", agent, sessionId=mine)
    assert service.post("RecordModelCalls", agent, sessionId=mine, calls=[call_record(1)])[0] == 400


async def test_the_fleet_shows_its_engines_and_its_pools(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL", sandbox="pool:warm")
    await console.enter(service.operator, "/fleet")
    tile = console.page.locator(".tile.pool")
    await expect(tile).to_contain_text("1 in use · 1 of 1 warm · at most 3")
    await expect(tile.locator(".meter i")).to_have_count(3)
    await expect(tile.locator(".meter .taken")).to_have_count(1)
    await expect(console.page.locator("table.fleet")).to_contain_text("pool warm")
    await expect(console.page.locator("table.fleet")).to_contain_text(session[:10])
    service.call("CloseSession", agent, sessionId=session)
    await console.page.get_by_role("button", name="Refresh").click()
    await expect(tile).to_contain_text("0 in use")
    await console.unharmed()


async def test_columns_order_the_rows_and_the_address_has_the_order(
    console: Console, service: RunningService, agent: str, other_agent: str
) -> None:
    for token in (agent, other_agent, agent):
        new_session(service, token, kind="SHELL", labels={"suite": "order"})
    await console.enter(service.operator, "/sessions?label=suite%3Dorder")
    agents = console.page.locator("table.sessions td.agent")
    await expect(agents).to_have_text(["builder", "aaron", "builder"])
    await console.page.get_by_role("link", name="Agent").click()
    await expect(agents).to_have_text(["aaron", "builder", "builder"])
    await expect(console.page).to_have_url(re.compile("sort=agent"))
    await expect(console.page.locator("th[aria-sort]")).to_have_count(1)
    await console.page.get_by_role("link", name="Agent").click()
    await expect(agents).to_have_text(["builder", "aaron", "builder"])
    # The command that waits is in the row, and not the one before it.
    session = new_session(service, agent, kind="SHELL", labels={"suite": "asks"})
    type_text(service, agent, session, "rm -f /nonexistent/thing\n")
    await console.page.goto(f"{service.http}/sessions?label=suite%3Dasks")
    row = console.page.locator("table.sessions tbody tr")
    await expect(row.locator(".state")).to_have_text("ASKS")
    await expect(row.locator(".command")).to_have_text("needs approval rm -f /nonexistent/thing")
    await console.unharmed()


async def test_the_wall_draws_terminals_and_opens_them(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent)
    service.call("RunCommand", agent, sessionId=session, command="printf '\\033[41m%200s\\033[0m\\n' red")
    await console.enter(agent, "/wall")
    picture = console.page.locator(f"canvas[aria-label='Screen of {session}']")
    await picture.scroll_into_view_if_needed()
    # Red of the palette of terminals, somewhere in the drawing.
    await console.page.wait_for_function(
        """(session) => {
          const canvas = document.querySelector(`canvas[aria-label='Screen of ${session}']`);
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          for (let at = 0; at < data.length; at += 4) {
            if (data[at] === 0xf2 && data[at + 1] === 0x77 && data[at + 2] === 0x7a) return true;
          }
          return false;
        }""",
        arg=session,
    )
    # The command that waits is named, and not the one before it.
    type_text(service, agent, session, "rm -f /nonexistent/thing\r")
    thumbnail = console.page.locator(".thumbnail", has=picture)
    await expect(thumbnail.locator(".command")).to_have_text("rm -f /nonexistent/thing")
    await picture.click()
    await expect(console.page).to_have_url(f"{service.http}/sessions/{session}")
    await console.unharmed()


async def test_several_people_watch_and_type_at_once(console: Console, service: RunningService, agent: str) -> None:
    session = new_session(service, agent)
    context = await console.page.context.browser.new_context()  # type: ignore[union-attr]
    await context.add_init_script(WATCH)
    second = Console(await context.new_page(), service)
    await console.enter(service.operator, f"/sessions/{session}")
    await second.enter(agent, f"/sessions/{session}")
    for page, button, text in ((console, "Take over", "operator"), (second, "Type", "owner")):
        await page.page.get_by_role("button", name=button).click()
        await expect(page.page.locator(".live-mark")).to_have_text("typing")
        await page.terminal().click()
        await page.page.keyboard.type(f"echo by-$((1+1))-{text}\r")
        for each in (console, second):
            await each.draws(f"by-2-{text}")
    assert kinds(service, session).count("takeover") == 1
    await second.unharmed()
    await context.close()
    await console.unharmed()


async def test_usage_is_drawn_by_session_and_in_all(console: Console, service: RunningService, agent: str) -> None:
    session = new_session(service, agent)
    type_text(service, agent, session, "while :; do :; done\r")
    await console.enter(service.operator, f"/sessions/{session}")
    await console.page.get_by_role("tab", name="Usage").click()
    await expect(console.page.locator(".charts.small .chart svg")).to_have_count(4)
    cpu = console.page.locator(".chart", has_text="CPU").locator("strong")
    await expect(cpu).to_have_text(re.compile(r"^[\d.]+ %"))
    await console.page.goto(f"{service.http}/usage")
    await expect(console.page.locator(".charts .chart svg")).to_have_count(4)
    await expect(console.page.locator("table.usage")).to_contain_text(session[:10])
    service.call("CloseSession", agent, sessionId=session, mode="FORCE")
    await console.unharmed()


async def test_the_audit_is_filtered_by_its_address_and_exported(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL")
    for text in ("echo found", "echo other"):
        service.call("RunCommand", agent, sessionId=session, command=text)
    await console.enter(service.operator, f"/audit?session={session}")
    rows = console.page.locator("table.audit tbody tr")
    await expect(rows.filter(has_text="builder ran")).to_have_count(2)
    await console.page.get_by_label("Contains").fill("found")
    await console.page.keyboard.press("Enter")
    await expect(console.page).to_have_url(re.compile("q=found"))
    await expect(rows.filter(has_text="echo other")).to_have_count(0)
    await console.page.get_by_label("Kind").select_option("sessions")
    await console.page.get_by_label("Contains").fill("")
    await console.page.keyboard.press("Enter")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("builder opened a shell in local with the profile default")
    await console.page.get_by_label("Kind").select_option("everything")
    await expect(rows.filter(has_text="echo other")).not_to_have_count(0)
    async with console.page.expect_download() as downloading:
        await console.page.get_by_role("button", name="Export").click()
    saved = await (await downloading.value).path()
    exported = [json.loads(line) for line in saved.read_text().splitlines()]
    assert {each["kind"] for each in exported} >= {"session_created", "command", "command_ended"}
    assert all(each["hash"] and each["sessionId"] == session for each in exported)
    await console.unharmed()


async def test_the_audit_rows_of_a_session_repeat_nothing(
    console: Console, service: RunningService, agent: str
) -> None:
    """Events, and the start of a command that has ended, are in the log as rows that say the same."""
    session = new_session(service, agent, kind="SHELL")
    service.call("RunCommand", agent, sessionId=session, command="echo once")
    await console.enter(service.operator, f"/sessions/{session}")
    await console.page.get_by_role("tab", name="Audit").click()
    rows = console.page.locator("aside table.audit tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.first).to_contain_text("builder ran echo once, exit 0 after")
    await expect(rows.last).to_contain_text("builder opened a shell")
    assert len(kinds(service, session)) > 2
    await console.unharmed()


async def test_a_sound_calls_for_approvals_only_if_it_is_turned_on(
    console: Console, service: RunningService, agent: str
) -> None:
    await console.page.add_init_script("""
      window.tones = 0;
      const start = OscillatorNode.prototype.start;
      OscillatorNode.prototype.start = function () { window.tones += 1; start.call(this); };
    """)
    session = new_session(service, agent, kind="SHELL")
    await console.enter(service.operator, "/approvals")
    type_text(service, agent, session, "rm -f /nonexistent/one\n")
    await expect(console.page.locator(".approvals > li", has_text="nonexistent/one")).to_be_visible()
    assert await console.page.evaluate("() => tones") == 0
    await console.page.get_by_label("sound for new ones").check()
    assert await console.page.evaluate("() => [tones, localStorage.length]") == [1, 1]
    second = new_session(service, agent, kind="SHELL")
    type_text(service, agent, second, "rm -f /nonexistent/two\n")
    await console.page.wait_for_function("() => tones === 2")
    await console.page.get_by_label("sound for new ones").uncheck()
    assert await console.page.evaluate("() => localStorage.length") == 0
    await console.unharmed()


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_texts_have_contrast_and_pages_fit_their_width(
    console: Console, service: RunningService, agent: str, colours: Any
) -> None:
    session = new_session(service, agent, kind="SHELL", labels={"a long label": "x" * 200})
    service.call("RunCommand", agent, sessionId=session, command="echo out; echo err >&2; sh -c 'exit 2'")
    calls = [call_record(1, model="claude-sonnet-4-5-20250929"), call_record(2, status=500)]
    service.call("RecordModelCalls", agent, sessionId=session, calls=calls)
    closed = new_session(service, agent, kind="SHELL")
    service.call("CloseSession", agent, sessionId=closed)
    asks = new_session(service, agent, kind="SHELL")
    type_text(service, agent, asks, f"rm -rf /nonexistent/{'y' * 300}\n")
    await console.page.emulate_media(color_scheme=colours)
    await console.page.goto(service.http)
    assert await console.page.evaluate(CONTRAST) == []
    await console.enter(service.operator)
    for path in (*PAGES, "/sessions?state=all", f"/sessions/{session}", f"/sessions/{closed}", f"/sessions/{asks}"):
        await console.page.goto(f"{service.http}{path}")
        await expect(console.page.locator("main").first).to_be_visible()
        await expect(console.page.locator(".skeleton")).to_have_count(0)
        assert await console.page.evaluate(CONTRAST) == [], path
        for width in (360, 1280, 2560):
            await console.page.set_viewport_size({"width": width, "height": 900})
            wide = await console.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{path} is {wide} px wider than {width}"
            menu = console.page.locator(".bar nav")
            cut = await menu.evaluate("(menu) => menu.scrollWidth - menu.clientWidth")
            assert cut <= 0, f"{cut} px of the menu are cut off at {width} px"
    await console.page.keyboard.press("?")
    await expect(console.page.locator("dialog .keys")).to_be_visible()
    assert await console.page.evaluate(CONTRAST) == []
    await console.unharmed()
