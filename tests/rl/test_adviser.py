"""Advice on group sizes agrees with counting and with simulation."""

from itertools import product

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.adviser import ENOUGH, advise, chance_of_signal, expected_chance


@pytest.mark.parametrize(("rate", "size"), [(0.5, 2), (0.25, 4), (0.9, 8), (0.0, 4), (1.0, 4), (0.3, 1)])
def test_the_chance_of_signal_is_that_of_counting_outcomes(rate, size):
    counted = 0.0
    for outcome in product([0, 1], repeat=size):
        if 0 < sum(outcome) < size:
            counted += rate ** sum(outcome) * (1 - rate) ** (size - sum(outcome))
    assert chance_of_signal(rate, size) == pytest.approx(counted)


def test_problems_that_differ_are_averaged_over():
    rng = np.random.default_rng(0)
    rates = rng.beta(0.8, 1.6, size=200_000)
    drawn = rng.binomial(4, rates)
    simulated = np.mean((drawn > 0) & (drawn < 4))
    assert expected_chance(rates.mean(), rates.std(), 4) == pytest.approx(simulated, abs=0.005)
    assert expected_chance(0.3, 0.0, 4) == chance_of_signal(0.3, 4)
    assert expected_chance(1.0, 0.0, 4) == 0 and expected_chance(0.5, 0.5, 4) == 0


def test_the_spread_of_the_draws_is_not_taken_for_that_of_the_problems():
    rng = np.random.default_rng(1)
    true = rng.beta(2, 4, size=20_000)
    advice = advise(rng.binomial(4, true) / 4, 4)
    assert advice.mean_rate == pytest.approx(true.mean(), abs=0.01) and advice.spread == pytest.approx(
        true.std(), abs=0.01
    )
    assert advice.chances[8] == pytest.approx(np.mean(chance_of_signal_all(true, 8)), abs=0.01)


def chance_of_signal_all(rates: np.ndarray, size: int) -> np.ndarray:
    return 1 - rates**size - (1 - rates) ** size


def test_rarer_success_asks_for_larger_groups_and_more_of_them():
    easy, hard = advise([0.5] * 50, 100), advise([0.06] * 50, 100)
    assert easy.group_size == 4 and easy.chances[4] >= ENOUGH > easy.chances[2]
    assert hard.group_size == 16 and "groups of 16" in str(hard)
    assert easy.groups_per_batch * easy.chances[4] >= 8


def test_hopeless_problems_are_called_so():
    assert "change the problems first" in str(advise([0.0] * 20, 8))
    assert advise([0.0] * 20, 8).group_size == 32


def test_nothing_measured_gives_no_advice():
    with pytest.raises(BadRequest, match="no measured pass rates"):
        advise([], 4)
    with pytest.raises(BadRequest, match=r"a pass rate of 1\.5"):
        chance_of_signal(1.5, 4)
