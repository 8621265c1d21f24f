"""Curves and formats against values worked out by hand."""

import math
import statistics

import pytest

from mint.dashboard import theme
from mint.dashboard.charts import Line, Mark, line_chart, sparkline
from mint.dashboard.curves import aligned, half_width, joined, smoothed, thinned
from mint.dashboard.data import Series


def series(*values: float) -> Series:
    return Series(list(range(len(values))), list(values))


def test_smoothing_is_the_weighted_mean_of_all_values_so_far() -> None:
    values, weight = [1.0, 3.0, 2.0, 8.0], 0.6
    expected = []
    for t in range(len(values)):
        weights = [weight ** (t - i) for i in range(t + 1)]
        expected.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    assert smoothed(series(*values), weight).values == pytest.approx(expected)
    assert smoothed(series(*values), 0.0).values == values


def test_thinning_keeps_ends_and_spikes() -> None:
    values = [math.sin(i / 50) for i in range(5000)]
    values[1234], values[4321] = 99.0, -99.0
    thin = thinned(series(*values), 400)
    assert len(thin) <= 400 and thin.steps == sorted(set(thin.steps))
    assert (thin.steps[0], thin.steps[-1]) == (0, 4999)
    assert max(thin.values) == 99.0 and min(thin.values) == -99.0
    assert all(values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))
    assert thinned(series(1.0, 2.0), 400) == series(1.0, 2.0)


def test_what_is_stacked_is_over_the_same_steps_and_0_where_nothing_was_said() -> None:
    often, seldom = aligned([series(1.0, 2.0, 3.0), Series([0, 2, 4], [5.0, 6.0, 7.0])])
    assert often == Series([0, 1, 2, 4], [1.0, 2.0, 3.0, 0.0])
    assert seldom == Series([0, 1, 2, 4], [5.0, 0.0, 6.0, 7.0])
    long, short = aligned([series(*range(7)), Series([3], [6.0])], points=3)
    assert long == Series([0, 3, 6], [1.0, 4.0, 6.0]) and short == Series([0, 3, 6], [0.0, 2.0, 0.0])


def test_seeds_are_joined_as_mean_and_interval() -> None:
    mean, half = joined([series(1.0, 2.0, 5.0), series(3.0, 4.0), series(2.0, 6.0)])
    assert mean == Series([0, 1], [2.0, 4.0])  # step 2 has one run only
    assert half == pytest.approx([4.30 * statistics.stdev([1, 3, 2]) / 3**0.5, 4.30 * 2 / 3**0.5])
    assert half_width([1.0]) == 0.0


def test_a_chart_marks_alarms_and_leaves_out_what_is_not_finite() -> None:
    options = line_chart([Line("a", series(1.0, math.nan, 3.0), "#111")], marks=[Mark(2, "#f00", "alarm: truncated")])
    assert options["series"][0]["data"] == [[0, 1.0], [2, 3.0]]
    assert options["series"][0]["markLine"]["data"][0]["xAxis"] == 2
    assert options["series"][0]["markLine"]["data"][0]["name"] == "alarm: truncated"


def test_a_smoothed_chart_shows_what_was_measured_behind() -> None:
    names = [s["name"] for s in line_chart([Line("a", series(1.0, 5.0, 3.0), "#111")], smoothing=0.5)["series"]]
    assert names == ["a", "a (measured)"]


def test_a_sparkline_runs_from_left_to_right_within_its_box() -> None:
    drawn = sparkline(series(0.0, 1.0), width=100, height=30)
    assert 'points="2.0,27.0 98.0,3.0"' in drawn
    assert sparkline(series(1.0)) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1234.5678, "1 235"), (3.0, "3"), (-0.5, "−0.500"), (1.5e-7, "1.50e−7"), (2.5e9, "2.50e9"),
     (None, "–"), (math.nan, "not finite"), (math.inf, "∞"), (123456.0, "123 456")],
)  # fmt: skip
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    assert theme.number(value).replace("\u2009", " ") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "250 ms"), (3.21, "3.2 s"), (59, "59 s"), (75, "1 min 15 s"), (3700, "1 h 1 min"), (200_000, "2 d 7 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert theme.duration(seconds) == text
