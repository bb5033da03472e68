"""The arithmetic of the growth curves, and their table and plot."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.growth import Curve, Point, counts_up_to, plot, table


def curve(*cpu: float) -> Curve:
    points = (Point(10**power, 1.0, each, 2.0, 0.0) for power, each in enumerate(cpu))
    return Curve("shells", "`true` in one & all", tuple(points))


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (10, [1, 10]), (300, [1, 10, 100, 300])])
def test_counts_are_powers_of_ten_and_the_most(most: int, counts: list[int]) -> None:
    assert counts_up_to(most) == counts


@pytest.mark.parametrize(("cpu", "tenfold"), [((0.5,), 1.0), ((0.5, 0.5, 0.5), 1.0), ((1.0, 3.0, 4.0), 2.0)])
def test_growth_is_the_mean_factor_of_a_tenfold_count(cpu: tuple[float, ...], tenfold: float) -> None:
    assert curve(*cpu).tenfold == pytest.approx(tenfold)


def test_the_table_names_a_curve_once() -> None:
    rows = table([curve(0.5, 0.25)]).splitlines()[2:]
    assert rows == [
        "| shells | `true` in one & all | 1 | 1.00 ms | 0.500 ms |  | 0.0 % |",
        "|  |  | 10 | 1.00 ms | 0.250 ms | 2.0 KB | 0.0 % |",
    ]


def test_the_plot_is_xml_with_a_line_for_each_curve() -> None:
    drawn = ElementTree.fromstring(plot([curve(0.5, 0.6, 0.7), curve(2.0, 30.0)]))
    assert len([each for each in drawn if each.tag.endswith("polyline")]) == 2
