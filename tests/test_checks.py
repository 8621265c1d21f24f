"""Every fault of a datum or a sample request is named by datum, key and position."""

import numpy as np
import pytest

from mint.checks import LOSS_FNS, check_data, check_loss, check_sample
from mint.errors import BadRequest
from mint.types import Datum, ModelInput, SampleRequest, SamplingParams, TensorData


def datum(length: int = 3, **inputs: object) -> Datum:
    given = {"target_tokens": list(range(length)), **inputs}
    return Datum(ModelInput.from_ints(range(length)), {k: v for k, v in given.items() if v is not None})


POLICY = {"logprobs": [-1.0] * 3, "advantages": [0.5] * 3}


def test_the_menu_of_losses_is_the_engines() -> None:
    from mint.engine.losses import LOSSES

    assert set(LOSSES) == set(LOSS_FNS)


@pytest.mark.parametrize(
    ("given", "loss_fn"),
    [
        (datum(), "cross_entropy"),
        (datum(weights=[-1.0, 0.0, 2.5]), "cross_entropy"),
        (datum(mask=[1, 1, 0], weights=[1, 1, 0]), "cross_entropy"),
        (datum(target_tokens=[[1, 2]] * 3, weights=[[0.5, 0.5]] * 3), "cross_entropy"),
        (datum(**POLICY, weights=[0, 1, 1]), "importance_sampling"),
        (datum(**POLICY, clip_low_threshold=[0.5] * 3), "ppo"),
        (datum(**POLICY, sequence_ratio_mask=[1, 1, 0]), "gspo"),
    ],
)
def test_good_data_passes(given: Datum, loss_fn: str) -> None:
    check_data([given], loss_fn, vocab_size=10, max_context=3)


@pytest.mark.parametrize(
    ("given", "loss_fn", "said"),
    [
        (datum(weights=[1.0, 1.0]), "cross_entropy", "datum 1: weights has length 2, model_input has 3"),
        (datum(target_tokens=None), "cross_entropy", "datum 1: loss_fn_inputs lacks 'target_tokens'"),
        (datum(target_tokens=[1, 2, 99]), "cross_entropy", "datum 1: target_tokens holds token id 99 at position 2"),
        (datum(target_tokens=[1, -100, 2]), "cross_entropy", "token id -100 at position 1"),
        (datum(weights=[1.0, np.nan, 1.0]), "cross_entropy", "weights holds nan at position 1"),
        (datum(weights=[[1.0]] * 3), "cross_entropy", r"weights has shape \[3, 1\], target_tokens has \[3\]"),
        (datum(mask=[1, 1, 0], weights=[1, 1, 1]), "cross_entropy", "weights and mask are the same input"),
        (datum(entropy=[1.0] * 3), "cross_entropy", "does not read loss_fn_inputs\\['entropy'\\]"),
        (datum(advantages=[1.0] * 3), "ppo", "lacks 'logprobs'"),
        (datum(**(POLICY | {"advantages": [1, np.inf, 1]})), "ppo", "advantages holds inf at position 1"),
        (datum(target_tokens=[[1]] * 3, **POLICY), "ppo", "two dimensions"),
        (datum(4), "cross_entropy", "4 tokens, more than the context of 3"),
        (Datum(ModelInput.empty(), {}), "cross_entropy", "model_input is empty"),
        (Datum(ModelInput.from_ints([1, 2, 50]), {}), "cross_entropy", "model_input holds token id 50 at position 2"),
        (
            datum(target_tokens=TensorData([1.0, 2.0, 3.0], "float32")),
            "cross_entropy",
            "target_tokens is float32",
        ),
    ],
)
def test_a_fault_is_named_by_datum_key_and_position(given: Datum, loss_fn: str, said: str) -> None:
    good = datum() if loss_fn == "cross_entropy" else datum(**POLICY)
    with pytest.raises(BadRequest, match=said):
        check_data([good, given], loss_fn, vocab_size=10, max_context=3)


def test_no_data_and_no_such_loss_are_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        check_data([], "cross_entropy")
    with pytest.raises(BadRequest, match="unknown loss_fn 'grpo'; known: cross_entropy"):
        check_data([datum()], "grpo")


def test_without_the_models_facts_only_what_needs_them_passes() -> None:
    check_data([datum(target_tokens=[1, 2, 10**6])], "cross_entropy")
    with pytest.raises(BadRequest, match="token id -1"):
        check_data([datum(target_tokens=[1, 2, -1])], "cross_entropy")


@pytest.mark.parametrize(
    "config", [{"beta": 1.0}, {"clip_low_threshold": "x"}, {"temperature": 0}, {"temperature": True}]
)
def test_an_option_the_loss_does_not_have_or_cannot_read_is_refused(config: dict) -> None:
    check_loss("ppo", {"clip_low_threshold": 0, "temperature": 0.7})
    with pytest.raises(BadRequest, match=next(iter(config))):
        check_loss("ppo", config)


def ask(prompt: int = 3, max_tokens: int | None = 5, **more: object) -> SampleRequest:
    return SampleRequest(ModelInput.from_ints(range(prompt)), SamplingParams(max_tokens=max_tokens), **more)


@pytest.mark.parametrize(
    "given",
    [ask(), ask(8, 1), ask(7, 2), ask(max_tokens=None), ask(target_prompt_logprobs=TensorData([[-1], [9]], "int64"))],
)
def test_a_good_sample_request_passes(given: SampleRequest) -> None:
    check_sample(given, vocab_size=10, max_context=8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ask(0), "prompt is empty"),
        (ask(9), "9 tokens, more than the context of 8"),
        (ask(7, 3), "ask for at most 2"),
        (SampleRequest(ModelInput.from_ints([1, 10])), "token id 10 at position 1"),
        (ask(num_samples=0), "num_samples is 0"),
        (ask(num_samples=10**6), "num_samples"),
        (ask(topk_prompt_logprobs=-1), "topk_prompt_logprobs"),
        (ask(prompt_logprobs_last_n=-1), "prompt_logprobs_last_n"),
        (ask(target_prompt_logprobs=TensorData([[1]], "int64")), r"shape \[2, K\]"),
        (ask(target_prompt_logprobs=TensorData([[1], [10]], "int64")), "token id 10 at position 1"),
    ],
)
def test_a_bad_sample_request_says_what_is_wrong(given: SampleRequest, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        check_sample(given, vocab_size=10, max_context=8)
