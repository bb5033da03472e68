"""The colours of the console: the contrast of each pair that a page uses, in light and in dark, by WCAG 2.2 AA."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

SOURCES: Final = Path(__file__).parents[2] / "console" / "src"
#: Texts, and the backgrounds on which they stand: 4.5:1.
TEXTS: Final = {
    "text": ("page", "panel", "raised", "accent-soft", "asks-soft", "bad-soft"),
    "dim": ("page", "panel", "raised", "accent-soft"),
    "faint": ("page", "panel", "accent-soft"),
    "accent": ("page", "panel", "accent-soft", "asks-soft"),
    "running": ("page", "panel", "accent-soft"),
    "asks": ("page", "panel", "asks-soft", "accent-soft"),
    "bad": ("page", "panel", "raised", "bad-soft", "accent-soft"),
    "good": ("page", "panel", "raised", "accent-soft"),
    "accent-text": ("accent",),
    # Buttons that confirm, and the badge of the approvals.
    "panel": ("bad", "good", "asks"),
}
#: Shapes, marks of the time line, lines of charts, and the edges of fields: 3:1.
SHAPES: Final = {
    **dict.fromkeys(("accent", "running", "asks", "bad", "good", "faint", "dim"), ("page", "panel")),
    "line-strong": ("page", "panel"),
}


def tokens(theme: int) -> dict[str, str]:
    """The colours of the style sheet in light (0) or in dark (1)."""
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (SOURCES / "style.css").read_text()
    )
    return {name: both[theme] for name, *both in pairs}


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_of_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("pairs", "least"), [(TEXTS, 4.5), (SHAPES, 3.0)], ids=["texts", "shapes"])
def test_pairs_of_colours_have_the_contrast_of_aa(
    theme: int, pairs: dict[str, tuple[str, ...]], least: float
) -> None:
    colours = tokens(theme)
    found = {
        f"{front} on {back}": round(contrast(colours[front], colours[back]), 2)
        for front, backs in pairs.items()
        for back in backs
    }
    assert {name: ratio for name, ratio in found.items() if ratio < least} == {}


def test_every_colour_is_a_token() -> None:
    """Colours outside of the tokens are those of terminals, which have one palette in light and dark."""
    text = (SOURCES / "style.css").read_text()
    rules = text[text.index("* { box-sizing") :]
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", rules)) == {"#14171c", "#c9ced6", "#9ba4b1", "#f0b950"}


def test_the_palette_of_terminals_can_be_read_on_its_background() -> None:
    source = (SOURCES / "xterm.ts").read_text()
    palette = re.findall(r"#[0-9a-f]{6}", source.partition("PALETTE = [")[2].partition("];")[0])
    background = re.findall(r'BACKGROUND = "(#[0-9a-f]{6})"', source)[0]
    # Black and bright black are backgrounds, or meant to be faint.
    readable = [each for at, each in enumerate(palette) if at not in (0, 8)]
    assert len(readable) == 14
    assert [each for each in readable if contrast(each, background) < 4.5] == []
