"""The built console in a real Chromium: sign in, watch, type, take over, approve, replay, filter, close.

Texts of agents and programs attack it, a flood is printed, and the service is killed. Every request that Chromium
makes is recorded: one to anything but the service fails the test. `make console-check` runs the longer checks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from playwright.async_api import Browser, expect

from tests.service.browser import Console, attacks, built, in_shell, kinds, new_session, service_with, type_text
from tests.service.running_service import (
    PATIENCE_SECONDS,
    RunningService,
    ServiceHome,
    new_home,
    running_service,
    until,
)
from tests.support.parts import needs

pytestmark = [needs("chromium"), built, pytest.mark.asyncio(loop_scope="module")]
#: `make console-check` sets it.
LONG: Final = bool(os.environ.get("HOLDFAST_CONSOLE_CHECKS"))
RULES: Final = """
[profiles.default.commands]
rules = [{ verdict = "ask", program = "rm", reason = "removals are reviewed" }]

[profiles.closed.takeover]
operators = false
"""
CANARY: Final = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with service_with(RULES) as service:
        yield service


@pytest.fixture(scope="module")
def agent(service: RunningService) -> str:
    return service.home.new_agent("builder")


@pytest.fixture(scope="module")
def closed_agent(service: RunningService) -> str:
    return service.home.new_agent("closed", "--profile", "closed")


# --- terminals ---------------------------------------------------------------------------------------------------


@needs("vim")
async def test_vim_is_drawn_an_operator_takes_over_types_and_closes(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, labels={"task": "17"})
    type_text(service, agent, session, "vim -N -u NONE -c 'set number' \r")
    await console.enter(service.operator, f"/sessions/{session}")
    await console.draws("~")
    # Watching is the default: keys do nothing.
    await console.terminal().click()
    await console.page.keyboard.type("ixyz")
    assert "takeover" not in kinds(service, session)
    await console.page.get_by_role("button", name="Take over").click()
    await expect(console.page.locator(".live-mark")).to_have_text("typing")
    assert "takeover" in kinds(service, session)
    await console.terminal().click()
    await console.page.keyboard.type("i")
    await console.draws("-- INSERT --")
    await console.page.keyboard.type("typed by a person")
    await console.draws("1 typed by a person")
    await console.page.keyboard.press("Escape")
    await console.page.keyboard.type(":q!\r")
    await expect(console.page.locator(".session-head .state")).to_have_text("IDLE")
    await expect(console.page.locator(".commands code").first).to_contain_text("vim -N")
    await console.page.get_by_role("button", name="Stop typing").click()
    await console.page.get_by_role("button", name="Close session").click()
    await console.page.locator("dialog").get_by_role("button", name="Close session").click()
    await expect(console.page.locator(".session-head .state")).to_have_text("CLOSED")
    assert "release" in kinds(service, session)
    await console.unharmed()


@needs("htop")
async def test_htop_keeps_its_colours_and_the_size_of_the_page_reaches_it(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, cols=100, rows=30)
    type_text(service, agent, session, "htop\r")
    await console.enter(agent, f"/sessions/{session}")
    await console.draws("F10Quit")
    cell = console.terminal().locator(".xterm-rows span", has_text="Help").first
    # Tried again: the page replaces the cells when htop draws anew.
    await expect(cell).to_have_css("background-color", "rgb(108, 207, 214)")
    await console.page.get_by_role("button", name="Type").click()
    await console.page.get_by_label("size of this page").check()
    await console.page.wait_for_function(
        "() => document.querySelector('[data-testid=terminal]').terminal.cols !== 100"
    )
    await console.terminal().click()
    await console.page.keyboard.type("q")
    await expect(console.page.locator(".session-head .state")).to_have_text("IDLE")
    await console.unharmed()


async def test_the_rules_can_forbid_a_takeover(
    console: Console, service: RunningService, closed_agent: str
) -> None:
    session = new_session(service, closed_agent)
    await console.enter(service.operator, f"/sessions/{session}")
    await console.page.get_by_role("button", name="Take over").click()
    await expect(console.page.locator(".notice.bad")).to_contain_text("cannot be taken over")
    await expect(console.page.locator(".live-mark")).to_have_text("watching")
    assert service.post("SendInput", service.operator, sessionId=session, data="bHMK")[0] == 403
    assert "takeover" not in kinds(service, session)


async def test_a_killed_service_loses_and_doubles_no_line(browser: Browser) -> None:
    with new_home() as home:
        with running_service(home) as first:
            operator, port = first.operator, first.http.rpartition(":")[2]
            session = new_session(first, operator)
            context = await browser.new_context(viewport={"width": 1280, "height": 900})
            console = Console(await context.new_page(), first)
            await console.enter(operator, f"/sessions/{session}")
            type_text(first, operator, session, "for i in $(seq 300); do echo line-$i-end; sleep 0.01; done\r")
            await console.draws("line-40-end")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(PATIENCE_SECONDS)
        await expect(console.page.locator("div.away")).to_be_visible()
        with running_service(home, "--listen-http", f"127.0.0.1:{port}"):
            await console.draws("line-300-end")
            numbers = [
                int(each[1]) for line in await console.lines() if (each := re.match(r"line-(\d+)-end", line))
            ]
            assert numbers == list(range(1, 301))
            await expect(console.page.locator("div.away")).to_have_count(0)
            await context.close()


# --- lists, approvals, replay ------------------------------------------------------------------------------------


async def test_filters_are_in_the_address_and_keys_choose_and_open(
    console: Console, service: RunningService, agent: str
) -> None:
    wanted = new_session(service, agent, kind="SHELL", labels={"suite": "filters", "shard": "1"})
    new_session(service, agent, kind="SHELL", labels={"suite": "others"})
    await console.enter(service.operator, "/sessions?label=suite%3Dfilters")
    rows = console.page.locator("table.sessions tbody tr")
    await expect(rows).to_have_count(1)
    await console.page.keyboard.press("j")
    await expect(rows.first).to_have_class(re.compile("chosen"))
    # A second one appears without a reload, and does not move the chosen row.
    second = new_session(service, agent, kind="SHELL", labels={"suite": "filters", "shard": "2"})
    await console.page.get_by_role("button", name=re.compile("new")).click()
    await expect(rows).to_have_count(2)
    await console.page.keyboard.press("/")
    await console.page.keyboard.type("shard=1")
    await expect(console.page).to_have_url(re.compile("q=shard"))
    await expect(rows).to_have_count(1)
    await console.page.keyboard.press("Escape")
    await console.page.keyboard.press("j")
    await console.page.keyboard.press("Enter")
    await expect(console.page).to_have_url(f"{service.http}/sessions/{wanted}")
    await console.page.keyboard.press("Control+k")
    await console.page.keyboard.type(second)
    # Results of the first letters may be shown for a moment.
    await expect(console.page.locator(".choices li code")).to_have_count(1)
    await expect(console.page.locator(".choices li code")).to_contain_text(second[:12])
    await console.page.keyboard.press("Enter")
    await expect(console.page).to_have_url(f"{service.http}/sessions/{second}")
    await console.page.keyboard.press("g")
    await console.page.keyboard.press("a")
    await expect(console.page).to_have_url(f"{service.http}/approvals")
    await console.page.keyboard.press("?")
    await expect(console.page.locator("dialog .keys")).to_be_visible()
    await console.unharmed()


#: The label of the element that has the focus, or its text.
FOCUSED: Final = """() => {
  const element = document.activeElement;
  return (element.getAttribute("aria-label") ?? element.textContent).trim();
}"""


async def test_a_session_is_watched_typed_into_and_left_by_the_keyboard_alone(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent)
    page = console.page
    await console.enter(service.operator, f"/sessions/{session}")
    await expect(page.locator(".live-mark")).to_have_text("watching")
    # Tab passes the terminal, which takes no keys.
    await page.get_by_role("button", name="Close session").focus()
    passed = []
    for _ in range(6):
        await page.keyboard.press("Tab")
        passed.append(await page.evaluate(FOCUSED))
    assert passed == ["Take over t", "Ctrl-C", "SIGTERM", "Replay p", "Time line of the session", "overview"]
    await page.keyboard.press("ArrowRight")
    await expect(page.get_by_role("tab", name="Policy")).to_be_focused()
    await expect(page.get_by_role("tab", name="Policy")).to_have_attribute("aria-selected", "true")
    await page.get_by_role("button", name="Take over").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".live-mark")).to_have_text("typing")
    await expect(page.get_by_label("Terminal input")).to_be_focused()
    # Now Tab belongs to the program, and one key leaves it.
    await page.keyboard.type("echo $((6*7))\r")
    await console.draws("42")
    await page.keyboard.press("Tab")
    assert await page.evaluate(FOCUSED) == "Terminal input"
    await page.keyboard.press("Control+Shift+L")
    await expect(page.locator(".live-mark")).to_have_text("watching")
    await expect(page.get_by_label("Terminal input")).not_to_be_focused()
    await asyncio.to_thread(until, lambda: kinds(service, session).count("release") == 1)
    await console.unharmed()


async def test_keys_belong_to_the_dialog_or_the_link_that_has_the_focus(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL", labels={"suite": "focus"})
    type_text(service, agent, session, "rm -f /nonexistent/focus\n")
    page = console.page
    await console.enter(service.operator, "/approvals")
    await expect(page.locator("pre.command", has_text="nonexistent/focus")).to_be_visible()
    # Behind a dialog no key answers an approval, and Escape closes the dialog.
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    for key in ("a", "a", "g", "s"):
        await page.keyboard.press(key)
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Really allow?")).to_have_count(0)
    await expect(page.locator("pre.command", has_text="nonexistent/focus")).to_be_visible()
    # The question is for the command that is chosen at that moment.
    await page.keyboard.press("a")
    await expect(page.get_by_role("button", name="Really allow?")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("button", name="Really allow?")).to_have_count(0)
    await page.goto(f"{service.http}/sessions?label=suite%3Dfocus")
    rows = page.locator("table.sessions tbody tr")
    await expect(rows).to_have_count(1)
    await page.keyboard.press("j")
    await expect(rows.get_by_role("link").first).to_be_focused()
    await page.get_by_role("link", name="Usage").focus()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(f"{service.http}/usage")
    for each in service.call("ListApprovals", service.operator)["approvals"]:
        service.call("AnswerApproval", service.operator, approvalId=each["approvalId"], approve=False)
    await console.unharmed()


async def test_an_approval_shows_the_whole_command_and_is_given_by_keys(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL")
    service.call("RunCommand", agent, sessionId=session, command="echo before")
    command = "rm -f /nonexistent/" + "x" * 300 + " \u202egpj.exe\u200b\u0627\u0644 keep"
    answers: list[Any] = []
    call = threading.Thread(
        target=lambda: answers.append(service.post("RunCommand", agent, sessionId=session, command=command))
    )
    call.start()
    await console.enter(service.operator, "/approvals")
    shown = console.page.locator("pre.command")
    await expect(shown).to_contain_text("x" * 300 + " \\u{202e}gpj.exe\\u{200b}")
    await expect(shown.locator("mark").first).to_have_text("rm")
    await expect(console.page.locator(".approvals .facts")).to_contain_text(re.compile(r"rules\.toml:\d+"))
    await expect(console.page.locator(".approvals header")).to_contain_text("builder")
    assert await console.page.title() == "(1) Holdfast"
    # The letters stand in the order in which the shell reads them.
    lefts = await shown.evaluate("""(shown) => {
      const text = shown.lastChild;
      return Array.from(text.data.trim(), (_, at) => {
        const range = document.createRange();
        range.setStart(text, at);
        range.setEnd(text, at + 1);
        return range.getBoundingClientRect().left;
      });
    }""")
    assert lefts == sorted(lefts)
    await console.page.keyboard.press("a")
    await expect(console.page.get_by_role("button", name="Really allow?")).to_be_visible()
    assert not answers
    await console.page.keyboard.press("a")
    await expect(console.page.locator(".answered li").first).to_contain_text("approved")
    call.join(PATIENCE_SECONDS)
    assert answers[0][0] == 200
    await expect(console.page).to_have_title("Holdfast")
    await console.unharmed()


async def test_a_recording_is_replayed_from_a_moment_and_saved(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent)
    for text in ("echo f''irst", "false", "sleep 0.5; printf '\\033[2J\\033[Hse''cond'"):
        service.call("RunCommand", agent, sessionId=session, command=text)
    service.call("CloseSession", agent, sessionId=session)
    await console.enter(service.operator, f"/sessions/{session}")
    await console.page.get_by_role("button", name="Replay p", exact=True).click()
    await expect(console.page).to_have_url(re.compile(r"at=0\.000$"))
    player = console.terminal("player")
    await expect(player).to_be_visible()
    assert "first" not in "".join(await console.lines("player"))
    await expect(console.page.locator(".timeline > svg .mark.failed")).to_have_count(1)
    assert await console.page.locator(".timeline > svg .mark.command").count() >= 1
    # The second command of the list, at its own moment: the output of the first one is on the screen.
    await console.page.locator(".commands button", has_text="sleep").click()
    await expect(console.page).to_have_url(re.compile(r"at=\d"))
    await console.draws("first", "player")
    assert "second" not in "".join(await console.lines("player"))
    await console.page.get_by_role("button", name="Play").click()
    await console.draws("second", "player")
    async with console.page.expect_download() as downloading:
        await console.page.get_by_role("button", name="Download .cast").click()
    saved = await (await downloading.value).path()
    text = saved.read_text()
    assert text.startswith('{"version":2,')
    assert "second" in text
    await console.unharmed()


async def test_a_shell_is_shown_as_blocks_and_the_audit_in_words(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent, kind="SHELL")
    service.call(
        "RunCommand",
        agent,
        sessionId=session,
        command="echo out; echo err >&2; exit_with() { return 3; }; exit_with",
    )
    await console.enter(service.operator, f"/sessions/{session}")
    block = console.page.locator(".block").first
    await expect(block).to_contain_text("✗ exit 3")
    await expect(block.locator(".stderr")).to_have_text("err\n")
    await console.page.fill(".run-line input", "echo $((6*7))")
    await console.page.keyboard.press("Enter")
    await expect(console.page.locator(".block").nth(1).locator("pre")).to_have_text("42\n")
    await console.page.goto(f"{service.http}/audit?session={session}")
    await expect(console.page.locator(".audit")).to_contain_text("builder ran echo out")
    await expect(console.page.locator(".audit")).to_contain_text(", exit 3 after")
    await expect(console.page.locator(".audit")).to_contain_text("operator took the session over")
    await expect(console.page.locator(".verify.ok")).to_contain_text("the chain holds")
    await console.unharmed()


async def test_outputs_that_a_shell_has_dropped_come_from_the_audit_log(
    console: Console, service: RunningService, agent: str
) -> None:
    """A shell keeps the output of its last four commands; the audit log has the beginning of each."""
    session = new_session(service, agent, kind="SHELL")
    long = "seq 1000; echo $((6*7)) >&2"
    for text in (long, *(f"echo number-$(({number}+0))" for number in range(6))):
        service.call("RunCommand", agent, sessionId=session, command=text)
    await console.enter(service.operator, f"/sessions/{session}")
    outputs = console.page.locator(".block pre")
    await expect(outputs).to_have_count(7)
    assert (await outputs.all_inner_texts())[1:] == [f"number-{number}\n" for number in range(6)]
    # Only the longest one is incomplete.
    await expect(outputs.first).to_contain_text(re.compile(r"^1\n2\n3\n"))
    note = console.page.locator(".block .asks")
    await expect(note).to_have_text("3.9 kB are no longer kept; this is the beginning in the audit log")
    await console.unharmed()


async def test_an_agent_sees_its_own_sessions_alone(console: Console, service: RunningService, agent: str) -> None:
    mine = new_session(service, agent, kind="SHELL", labels={"whose": "mine"})
    theirs = new_session(service, service.operator, kind="SHELL", labels={"whose": "theirs"})
    await console.enter(agent, "/sessions?q=whose")
    await expect(console.page.locator("table.sessions tbody tr")).to_have_count(1)
    await expect(console.page.locator("table.sessions")).to_contain_text(mine[:10])
    assert await console.page.get_by_role("link", name="Fleet").count() == 0
    await console.page.goto(f"{service.http}/sessions/{theirs}")
    await expect(console.page.locator(".empty")).to_contain_text("No session")
    for method in ("ListSandboxes", "ListUsage", "VerifyAudit"):
        assert service.post(method, agent)[0] == 403
    for method in ("ListCommands", "ReadRecording", "TakeOver"):
        assert service.post(method, agent, sessionId=theirs)[0] == 404
    assert service.call("GetScreens", agent, sessionIds=[theirs])["screens"][0]["text"] == ""


async def test_the_token_is_in_the_storage_of_its_tab_and_nowhere_else(
    console: Console, service: RunningService, agent: str
) -> None:
    session = new_session(service, agent)
    await console.enter(agent, f"/sessions/{session}")
    await console.draws("$")
    page = console.page
    assert await page.evaluate("() => Object.values(sessionStorage)") == [agent]
    assert await page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
    assert not any(agent in text for text in [*console.requested, page.url, await page.content()])
    other = await page.context.new_page()
    await other.goto(f"{service.http}/sessions/{session}")
    await expect(other.locator("#token")).to_be_visible()
    await page.click("#leave")
    await expect(page.locator("#token")).to_be_visible()
    assert await page.evaluate("() => sessionStorage.length") == 0
    assert agent not in await page.content()
    await page.fill("#token", "wrong")
    await page.keyboard.press("Enter")
    await expect(page.locator(".failed")).to_contain_text("TOKEN_UNKNOWN")
    # The next attempt needs no click.
    await expect(page.locator("#token")).to_be_focused()
    await console.unharmed()


# --- hostile texts and floods ------------------------------------------------------------------------------------


async def test_hostile_output_titles_labels_and_names_do_nothing(
    console: Console, service: RunningService, agent: str
) -> None:
    texts = attacks(CANARY)
    labels = {f"label {number}": text[:250] for number, text in enumerate(texts)}
    link = (
        b"\x1b]8;;javascript:ran.push(3)\x1b\\a link\x1b]8;;\x1b\\ \x1b]8;;"
        + CANARY.encode()
        + b"/x\x07here\x1b]8;;\x07"
    )
    sequences = [
        *(text.encode() + b"\r\n" for text in texts),
        b"\x1b]0;<script>ran.push(1)</script>\xe2\x80\xae\x07\x1b]2;</title><img src=x onerror=ran.push(2)>\x07",
        b"\x1b]8;;javascript:ran.push(3)\x1b\\a link\x1b]8;;\x1b\\ \x1b]8;;"
        + CANARY.encode()
        + b"/x\x07b\x1b]8;;\x07",
        b"\x1b]52;c;"
        + base64.b64encode(b"clipboard")
        + b"\x07\x1b]52;c;?\x07\x1b]10;?\x07\x1b[14t\x1b[21t\x1bP+q\x1b\\",
        b"\xe2\x80\xae turned \xff\xfe\xed\xa0\x80\r\nE" + b"\xcc\x81" * 500 + b"\r\n",
    ]
    line = "head -c 100000 /dev/zero | tr '\\0' y; echo"
    command = "; ".join([in_shell(b"".join(sequences)), line, in_shell(link), "echo the e''nd of it"])
    session = new_session(service, agent, labels=labels)
    service.call("RunCommand", agent, sessionId=session, command=command)
    await console.page.context.grant_permissions(["clipboard-read"], origin=service.http)
    await console.enter(service.operator, f"/sessions/{session}")
    await console.draws("the end of it")
    # A click on each link opens nothing.
    row = console.terminal().locator(".xterm-rows > div", has_text="a link here")
    box = await row.bounding_box()
    assert box is not None
    for column in (1, 8):
        await console.page.mouse.click(box["x"] + box["width"] / 80 * (column + 0.5), box["y"] + box["height"] / 2)
    await expect(console.page.locator(".session-head")).to_contain_text("onerror=ran.push(2)")
    assert await console.page.title() == "Holdfast"
    # A terminal that is watched answers no query of a program, or the answer would be typed.
    assert [kind for kind in kinds(service, session) if kind in ("input", "takeover")] == []
    await console.unharmed()
    pages = ("/sessions", "/wall", f"/sessions/{session}?at=0", "/audit", "/usage", "/fleet", "/approvals")
    for path in pages:
        await console.page.goto(f"{service.http}{path}")
        await expect(console.page.locator("main")).to_be_visible()
    await console.page.goto(f"{service.http}/audit?session={session}")
    await expect(console.page.locator(".audit")).to_contain_text("builder ran echo PGltZyBz")
    await console.unharmed()
    assert console.page.url.startswith(service.http)


#: Counts the longest time in which the page could not react.
PAUSES: Final = """() => {
  window.longest = 0;
  let last = performance.now();
  setInterval(() => {
    const now = performance.now();
    longest = Math.max(longest, now - last - 20);
    last = now;
  }, 20);
}"""
FLOOD: Final = f"yes {'flood ' * 12}"


async def test_a_flood_leaves_the_page_responsive_and_bounded(
    console: Console, service: RunningService, agent: str
) -> None:
    """The output is printed as fast as the terminal takes it: a page that is behind gets the screen instead."""
    megabytes = 400 if LONG else 15
    session = new_session(service, agent)
    await console.enter(agent, f"/sessions/{session}")
    await console.draws("$")
    await console.page.evaluate(PAUSES)
    began = time.monotonic()
    type_text(service, agent, session, f"{FLOOD} | head -c {megabytes}000000; echo ov''er\r")
    delays: list[float] = []
    while not any("over" in line for line in (await console.lines())[-60:]):
        at = time.monotonic()
        await console.page.get_by_role("tab", name="Policy" if len(delays) % 2 else "Overview").click()
        delays.append(time.monotonic() - at)
        assert time.monotonic() - began < PATIENCE_SECONDS * 4
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    lines = await console.page.evaluate(
        "() => document.querySelector('[data-testid=terminal]').terminal.buffer.active.length"
    )
    await report_flood(console, megabytes, seconds, delays)
    if LONG:
        bare = await asyncio.to_thread(pty_rate)
        print(f"flood: a PTY that is only read carries {bare:.1f} MB/s here: {megabytes / seconds / bare:.2f} x")
    # 5,000 lines above the screen, and the messages of the window.
    assert lines <= 5_200
    await console.unharmed()


async def test_a_flood_of_a_shell_leaves_the_page_responsive_and_bounded(
    console: Console, service: RunningService, agent: str
) -> None:
    """A shell's output is text in a block, of which the page keeps the end."""
    megabytes = 400 if LONG else 15
    session = new_session(service, agent, kind="SHELL")
    await console.enter(service.operator, f"/sessions/{session}")
    await expect(console.page.locator(".blocks")).to_contain_text("No command ran yet.")
    await console.page.evaluate(PAUSES)
    command = f"{FLOOD} | head -c {megabytes}000000; echo; echo ov''er"
    began = time.monotonic()
    call = asyncio.create_task(
        asyncio.to_thread(service.post, "RunCommand", agent, sessionId=session, command=command)
    )
    block = console.page.locator(".block pre")
    delays: list[float] = []
    while not (await block.count() and (await block.inner_text()).endswith("over\n")):
        at = time.monotonic()
        await console.page.get_by_role("tab", name="Policy" if len(delays) % 2 else "Overview").click()
        delays.append(time.monotonic() - at)
        assert time.monotonic() - began < PATIENCE_SECONDS * 4
        await asyncio.sleep(0.1)
    await report_flood(console, megabytes, time.monotonic() - began, delays)
    assert (await call)[0] == 200
    # 64 KiB of text, and the last piece that was added to it.
    assert len(await block.inner_text()) <= 2 * 64 * 1024
    await console.unharmed()


async def report_flood(console: Console, megabytes: int, seconds: float, delays: list[float]) -> None:
    longest, heap = await console.page.evaluate("() => [longest, performance.memory?.usedJSHeapSize ?? 0]")
    delays = sorted(delays) or [0.0]
    print(
        f"flood: {megabytes} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s; a click takes "
        f"{1000 * delays[len(delays) // 2]:.0f} ms in the middle and {1000 * delays[-1]:.0f} ms at most, "
        f"the page's longest pause is {longest:.0f} ms, its heap {heap / 1e6:.0f} MB"
    )
    assert heap < 200e6


def pty_rate(megabytes: int = 400) -> float:
    """Megabytes a second of the same output through a PTY whose other end is only read."""
    ours, theirs = os.openpty()
    began = time.monotonic()
    writer = subprocess.Popen(["sh", "-c", f"{FLOOD} | head -c {megabytes}000000"], stdout=theirs)
    os.close(theirs)
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while os.read(ours, 65536):
            pass
    os.close(ours)
    writer.wait(PATIENCE_SECONDS)
    return megabytes / (time.monotonic() - began)


@pytest.mark.skipif(not LONG, reason="longer: make console-check")
async def test_ten_thousand_sessions_are_listed_by_pages(console: Console, browser: Browser) -> None:
    with new_home() as home, running_service(home) as service:
        example = new_session(service, service.operator, kind="SHELL", labels={"n": "0"})
        service.call("CloseSession", service.operator, sessionId=example)
        multiply_sessions(home, example, 10_000)
        console.service = service
        began = time.monotonic()
        await console.enter(service.operator, "/sessions?state=all")
        await expect(console.page.locator("table.sessions tbody tr")).to_have_count(100)
        print(f"10,000 sessions: the first page after {time.monotonic() - began:.2f} s")
        await expect(console.page.locator(".counts")).to_contain_text("10,001 closed")
        await console.page.get_by_role("link", name=re.compile("Next 100")).click()
        await expect(console.page).to_have_url(re.compile("page="))
        await console.page.fill("input[type=search]", "n=9999")
        await expect(console.page.locator("table.sessions tbody tr")).to_have_count(1)
        await console.unharmed()


def multiply_sessions(home: ServiceHome, example: str, count: int) -> None:
    """Copy the row of a closed session, and give each copy an id and a label of its own."""
    with sqlite3.connect(home.database, timeout=PATIENCE_SECONDS) as database:
        cursor = database.execute("SELECT * FROM sessions WHERE session_id = ?", [example])
        names, row = [each[0] for each in cursor.description], cursor.fetchone()
        values = dict(zip(names, row, strict=True))
        rows = [
            {**values, "session_id": f"ses-copy-{number:05}", "request_id": "", "labels": f'{{"n":"{number}"}}'}
            for number in range(1, count + 1)
        ]
        marks = ", ".join(f":{name}" for name in names)
        database.executemany(f"INSERT INTO sessions ({', '.join(names)}) VALUES ({marks})", rows)
        database.executemany(
            "INSERT INTO session_labels (session_id, name, value) VALUES (?, 'n', ?)",
            [(each["session_id"], str(number)) for number, each in enumerate(rows, start=1)],
        )
    database.close()
