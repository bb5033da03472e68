"""Growth as the soak defines it: a slope within lives, or from life to life; and counter-examples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.steadiness import Growth, Sample, measure, table, write_csv, write_svg

LIFE_SECONDS = 300


def samples(
    rss_mb: Callable[[int, float], float], lives: int = 4, descriptors: int = 50, seconds: int = LIFE_SECONDS
) -> list[Sample]:
    """A server that was started again and again; `rss_mb` of its life and of the seconds in it. Some noise."""
    chance = random.Random(3)
    return [
        Sample(
            at=life * seconds + second,
            who="server",
            life=life,
            rss_kb=1000 * rss_mb(life, second) + chance.uniform(-500, 500),
            anonymous_kb=1000 * rss_mb(life, second),
            descriptors=descriptors + chance.randrange(10),
            threads=2,
            spool_kb=0.0,
        )
        for life in range(lives)
        for second in range(0, seconds, 2)
    ]


def rss(found: list[Growth]) -> Growth:
    return next(each for each in found if each.quantity.name == "RSS")


def test_steady_work_is_flat_though_each_life_warms_up() -> None:
    found = measure(samples(lambda life, second: 30 + min(second, 80) / 8), warm_up=90)
    names = [each.quantity.name for each in found]
    assert names == ["RSS", "anonymous", "descriptors", "threads"], "no spool: nothing to say"
    assert not any(each.too_much for each in found)
    assert rss(found).first_quarter == pytest.approx(40, abs=0.2)


def test_a_leak_shows_though_every_restart_hides_it() -> None:
    found = rss(measure(samples(lambda life, second: 30 + second / 100), warm_up=90))
    assert found.within == pytest.approx(11, rel=0.1), "3 MB in each of four lives"
    assert abs(found.between) < 1
    assert found.too_much


def test_lives_that_begin_heavier_show() -> None:
    found = rss(measure(samples(lambda life, second: 30 + 2 * life), warm_up=90))
    assert abs(found.within) < 1
    assert found.between == pytest.approx(7, rel=0.1)
    assert found.too_much


def test_what_shrinks_is_not_too_much() -> None:
    assert not rss(measure(samples(lambda life, second: 60 - second / 100), warm_up=90)).too_much


def test_a_long_life_that_levels_off_is_flat_though_its_slope_is_not() -> None:
    """An allocator that approaches 60 MB in the first hour."""
    found = rss(measure(samples(lambda life, second: 60 - 8 * math.exp(-second / 1500), lives=1, seconds=7200)))
    assert found.within > found.quantity.tolerance
    assert found.halves == pytest.approx(0.3, abs=0.1)
    assert not found.too_much


def test_a_long_life_that_grows_to_its_end_is_not_flat() -> None:
    found = rss(measure(samples(lambda life, second: 50 + max(0, second - 4800) / 1000, lives=1, seconds=7200)))
    assert found.within < found.quantity.tolerance
    assert found.halves == pytest.approx(1.3, abs=0.2)
    assert found.too_much


def test_a_life_of_an_hour_has_no_last_hour_to_compare() -> None:
    assert rss(measure(samples(lambda life, second: 50, lives=1, seconds=3600))).halves is None


def test_lives_that_were_too_short_say_nothing() -> None:
    with pytest.raises(ValueError, match="every life of the server was shorter than 400 s"):
        measure(samples(lambda life, second: 30), warm_up=400)


def test_the_files(tmp_path: Path) -> None:
    taken = samples(lambda life, second: 30, lives=2)
    write_csv(str(tmp_path / "soak.csv"), taken)
    write_svg(str(tmp_path / "soak.svg"), taken, [float(LIFE_SECONDS)])
    header, *lines = (tmp_path / "soak.csv").read_text().splitlines()
    assert header == "at,who,life,rss_kb,anonymous_kb,descriptors,threads,spool_kb"
    assert len(lines) == len(taken)
    plot = ElementTree.parse(tmp_path / "soak.svg").getroot()
    kind = "{http://www.w3.org/2000/svg}"
    assert len(plot.findall(f"{kind}polyline")) == 4 * 2, "a line for each life, but for the spool"
    assert "| server | RSS | 30.0 MB |" in table(measure(taken))
