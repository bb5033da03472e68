"""The drawing of a terminal recording as an animated SVG (`bench/picture.py`)."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from bench.picture import COMMANDS, LONGEST_PAUSE, frames, svg
from holdfast.client.screen.asciicast import CastEvent

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(document).iter(f"{SVG}text")]


def test_every_state_of_a_line_is_one_element() -> None:
    events = [CastEvent(0.0, "o", b"$ "), CastEvent(0.5, "o", b"ls\r\n<a>\r\n"), CastEvent(60.0, "o", b"$ ")]
    drawn = frames(events)
    assert drawn[-1].start <= 0.5 + LONGEST_PAUSE
    assert texts(svg(drawn)) == ["$", "$ ls", "<a>", "$"]


def test_the_picture_of_the_readme_shows_the_session_to_its_end() -> None:
    shown = texts((Path(__file__).parents[2] / "docs" / "terminal.svg").read_text())
    assert {f"$ {command}" for command in COMMANDS} <= set(shown)
    assert "exit code 3" in shown
