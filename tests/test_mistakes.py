"""Planted mistakes in training data are named by datum, position and cause; correct data of every kind pass."""

import numpy as np
import pytest

from mint.checks import check_data, check_loss
from mint.errors import BadRequest
from mint.mistakes import check_plausible, warnings_about
from mint.types import Datum, ModelInput

PROMPT, ANSWER = [11, 12, 13, 14, 15], [21, 22, 23, 24]
FULL = PROMPT + ANSWER
PREFIX, REST = len(PROMPT) - 1, len(ANSWER)
LOGPROBS = [-0.5, -1.25, -0.0, -2.0]
"""The third token had probability 1."""


def rl(tokens: list[int] = FULL, **inputs: object) -> Datum:
    """As the documents make it, but for what is given; None leaves an input out."""
    given = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * PREFIX + LOGPROBS,
        "advantages": [0.0] * PREFIX + [0.7] * REST,
    } | inputs
    return Datum(ModelInput.from_ints(tokens[:-1]), {k: v for k, v in given.items() if v is not None})


def check(data: list[Datum], loss_fn: str = "importance_sampling", config: dict | None = None) -> None:
    check_loss(loss_fn, config)
    check_data(data, loss_fn)
    check_plausible(data, loss_fn, config)


SHIFTED_LEFT = {"advantages": [0.0] * (PREFIX - 1) + [0.7] * REST + [0.0], "logprobs": [0.0] * PREFIX + [-1.0] * REST}
SHIFTED_RIGHT = {
    "advantages": [0.0] * PREFIX + [0.7] * REST,
    "logprobs": [0.0] * (PREFIX - 1) + [-1.0] * REST + [0.0],
}

PLANTED = {
    "targets not shifted": (rl(target_tokens=FULL[:-1]), "the shift was forgotten. At position 4 the target is 15"),
    "targets shifted twice": (rl(target_tokens=[*FULL[2:], 0]), "they were shifted twice. At position 4"),
    "targets shifted backwards": (rl(target_tokens=[0, *FULL[:-2]]), "shifted the wrong way. At position 4"),
    "unshifted lengths": (rl(advantages=[0.7] * 9), "advantages has length 9, model_input has 8, as if it were not"),
    "the prompt in the loss": (rl(advantages=[0.7] * 8), "positions 0 to 3 have log-prob 0.0 and an advantage"),
    "probabilities": (rl(logprobs=[0.0] * PREFIX + [0.9, 0.2, 1.0, 0.5]), "0.9 at position 4.*log of these prob"),
    "losses": (rl(logprobs=[0.0] * PREFIX + [0.5, 1.25, 0.1, 2.0]), "0.5 at position 4.*look like losses"),
    "one positive log-prob": (rl(logprobs=[0.0] * PREFIX + [-1.0, 0.3, -1.0, -1.0]), "holds 0.3 at position 5"),
    "a log-prob that is no number": (rl(logprobs=[0.0] * 7 + [np.nan]), "logprobs holds nan at position 7"),
    "advantages without log-probs": (rl(logprobs=None), "lacks 'logprobs'.*Pass on sequence.logprobs"),
    "the mask inverted": (rl(weights=[1.0] * PREFIX + [0.0] * REST), "wrong way round"),
    "advantages one too early": (rl(**SHIFTED_LEFT), "one position before.*at position 3, the first log-prob at 4"),
    "advantages one too late": (rl(**SHIFTED_RIGHT), "one position after.*at position 4, the first log-prob at 3"),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_a_planted_mistake_is_named(fault: str) -> None:
    bad, said = PLANTED[fault]
    everywhere = "one too" in fault  # in a single datum it could be a token of probability 1
    with pytest.raises(BadRequest, match=f"datum {0 if everywhere else 1}.*{said}"):
        check([bad, bad] if everywhere else [rl(), bad])


@pytest.mark.parametrize(
    "fault", ["targets not shifted", "the prompt in the loss", "probabilities", "the mask inverted"]
)
def test_whoever_means_it_can_say_so(fault: str) -> None:
    bad, _ = PLANTED[fault]
    with pytest.raises(BadRequest, match=r'pass loss_fn_config={"unchecked": 1}'):
        check([bad], config={"unchecked": 0})
    check([bad], config={"unchecked": 1})
    check([bad], "ppo", config={"unchecked": 1.0, "clip_low_threshold": 0.9})


@pytest.mark.parametrize("value", [2, -1, "1", True])
def test_the_switch_is_on_or_off(value: object) -> None:
    with pytest.raises(BadRequest, match="must be 0 or 1"):
        check_loss("ppo", {"unchecked": value})  # type: ignore[dict-item]


def sft(tokens: list[int], **inputs: object) -> Datum:
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})


CORRECT = {
    "as documented": (rl(), "importance_sampling"),
    "advantages everywhere, masked by weights": (rl(advantages=[0.7] * 8, weights=[0.0] * 4 + [1.0] * 4), "ppo"),
    "no signal": (rl(advantages=[0.0] * 8), "ppo"),
    "an answer that is cut off and masked": (rl(weights=[0.0] * 8), "ppo"),
    "a sure policy": (rl(logprobs=[0.0] * 7 + [-0.1]), "importance_sampling"),
    "log-probs of prompt and answer": (rl(logprobs=[-1.0] * 8, advantages=[0.7] * 8), "importance_sampling"),
    "placeholder log-probs": (rl(logprobs=[0.0] * 8), "importance_sampling"),
    "several turns": (
        sft(FULL * 2, logprobs=[0.0] * 4 + [-1.0] * 4 + [0.0] * 5 + [-1.0] * 4,
            advantages=[0.0] * 4 + [0.5] * 4 + [0.0] * 5 + [0.5] * 4), "cispo",
    ),
    "a prompt of one token": (sft([5, 6, 7], logprobs=[0.0, -1.0], advantages=[1.0, 1.0]), "importance_sampling"),
    "rounding above 0": (rl(logprobs=[0.0] * 4 + [-1.0, 1e-6, -1.0, -1.0]), "ppo"),
    "all tokens alike": (sft([7] * 9), "cross_entropy"),
    "alternating tokens": (sft([1, 2] * 6), "cross_entropy"),
    "prompt and answer alike": (sft(FULL, weights=[1.0] * 8), "cross_entropy"),
    "weights of any sign and size": (sft(FULL, weights=[-3.5, 0, 1e6, 0, 2, -1e-9, 0, 4]), "cross_entropy"),
    "targets of the sender's own": (sft(FULL, target_tokens=[3, 1, 4, 1, 5, 9, 2, 6]), "cross_entropy"),
    "padded prompt targets": (
        sft(FULL, target_tokens=[0] * 4 + ANSWER, weights=[0.0] * 4 + [1.0] * 4), "cross_entropy",
    ),
    "soft targets": (sft(FULL, target_tokens=[[1, 2]] * 8, weights=[[0.5, 0.5]] * 8), "cross_entropy"),
    "a token": (sft([1, 2]), "cross_entropy"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(CORRECT))
def test_correct_data_pass(kind: str) -> None:
    datum, loss_fn = CORRECT[kind]
    check([datum], loss_fn)
    check([datum, datum], loss_fn)


def test_one_token_of_probability_1_at_the_start_is_no_offset() -> None:
    sure = rl(
        advantages=[0.0] * PREFIX + [0.7] * (REST - 1) + [0.0], logprobs=[0.0] * (PREFIX + 1) + [-1.0] * (REST - 1)
    )
    check([sure, rl()])


def test_random_correct_data_are_never_refused() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        length, prompt = int(rng.integers(2, 30)), int(rng.integers(1, 10))
        vocabulary = int(rng.choice([2, 5, 1000]))  # few distinct tokens match many shifts
        tokens = rng.integers(0, vocabulary, prompt + length).tolist()
        sure = rng.random(length) < rng.random()
        logprobs = np.where(sure, 0.0, -rng.random(length))
        prefix = [0.0] * (prompt - 1)
        datum = Datum(
            ModelInput.from_ints(tokens[:-1]),
            {
                "target_tokens": tokens[1:],
                "logprobs": [*prefix, *logprobs],
                "advantages": [*prefix, *[float(rng.normal())] * length],
            },
        )
        if prompt > 1 or not sure[:2].all():  # the one case that cannot be told from a prompt in the loss
            check([datum])


def test_what_documented_code_may_send_is_warned_of_and_not_refused() -> None:
    placeholder, silent = rl(logprobs=[0.0] * 8), sft(FULL, weights=[0.0] * 8)
    check([placeholder])
    check([silent], "cross_entropy")
    assert "exactly 0.0" in next(warnings_about([placeholder, placeholder], "importance_sampling"))
    assert "every weight" in next(warnings_about([silent], "cross_entropy"))
    assert not list(warnings_about([placeholder, rl()], "importance_sampling"))
    assert not list(warnings_about([silent, sft(FULL)], "cross_entropy"))
    assert not list(warnings_about([rl(advantages=[0.0] * 8)], "importance_sampling"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"clip_low_threshold": 0.0, "clip_high_threshold": 0.2},
            r"'clip_high_threshold'\] is 0.2.*at least 1. For a distance of 0.2 give 1.2",
        ),
        ({"clip_low_threshold": 1.5, "clip_high_threshold": 2.0}, r"'clip_low_threshold'\] is 1.5.*at most 1"),
    ],
)
def test_a_clip_range_given_as_distances_from_1_is_refused_with_the_range_that_was_meant(config, said) -> None:
    with pytest.raises(BadRequest, match=said):
        check([rl()], "ppo", config)
    check([rl()], "ppo", config | {"unchecked": 1})
    check([rl()], "ppo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
