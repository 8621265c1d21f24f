import math

import pytest

from mint.errors import BadRequest
from mint.rl.schedules import Schedule, as_schedule


def test_a_number_is_constant() -> None:
    assert [as_schedule(2e-5)(step, 10) for step in range(12)] == [2e-5] * 12
    assert as_schedule("0.8") == as_schedule("constant 0.8") == Schedule(0.8)


def test_linear_runs_from_start_to_end() -> None:
    schedule = as_schedule("linear 1.0 -> 0.6")
    assert [schedule(step, 5) for step in range(7)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6])
    assert as_schedule("1.0 -> 0.6") == schedule


def test_cosine_follows_half_a_wave() -> None:
    schedule = as_schedule("cosine 2e-5 -> 2e-6")
    for step in range(11):
        expected = 2e-6 + (2e-5 - 2e-6) * (1 + math.cos(math.pi * step / 10)) / 2
        assert schedule(step, 11) == pytest.approx(expected)


def test_warmup_rises_to_the_start_and_the_rest_follows_the_shape() -> None:
    schedule = as_schedule("linear 1 -> 0, warmup 3")
    assert [schedule(step, 8) for step in range(8)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert as_schedule("1e-4, warmup 1")(0, 5) == pytest.approx(5e-5)


def test_a_schedule_of_one_step_is_its_start() -> None:
    assert as_schedule("cosine 1 -> 0")(0, 1) == 1.0


def test_a_schedule_passes_through() -> None:
    schedule = Schedule(1.0, 0.5, "cosine", 2)
    assert as_schedule(schedule) is schedule


@pytest.mark.parametrize("text", ["cosine", "linear 1 to 0", "1 -> ", "cosine 1 -> 0, warm 3", ""])
def test_what_is_no_schedule_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadRequest, match="cosine 2e-5 -> 0, warmup 10"):
        as_schedule(text)


@pytest.mark.parametrize("text", ["square 1 -> 0", "constant 1 -> 0", "linear 1"])
def test_shapes_and_ends_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"shape|end value"):
        as_schedule(text)
