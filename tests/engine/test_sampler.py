"""The whole sampler on tiny random models, against transformers and the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import logits, peft_model, plain_model, random_adapter, random_tokens
from tiny_models import VOCAB

from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.native.library import library
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.stops import StopText
from mint.engine.sampler.streams import stream_of, uniforms
from mint.engine.trainer import Trainer
from mint.errors import BadRequest, Internal, MintError
from mint.types import Datum, LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams, TensorData

SMALL = Limits(block_size=4, blocks=8, max_blocks=256, token_budget=64, max_sequences=32)
# The large weights of the test models amplify rounding: in float32 their log-probs are up to 2.3e-5 away from those in
# float64, and those of transformers as well.
TOLERANCE = 3e-5
# Sampler and trainer round alike in native code; through torch, where there is no compiler, they do not.
AGREEMENT = 1e-5 if library().functions is not None else TOLERANCE


def request(prompt: Sequence[int], n: int = 1, **options: Any) -> SampleRequest:
    fields = {name: options.pop(name) for name in list(options) if name in SampleRequest.__dataclass_fields__}
    params = SamplingParams(**{"max_tokens": 12, "seed": 1, "stop": [], **options})
    return SampleRequest(ModelInput.from_ints(prompt), params, n, **fields)


def run(sampler: Sampler, *jobs: tuple[Adapter | None, SampleRequest]) -> list[SampleResponse]:
    """All jobs at once; their responses."""
    answers: dict[int, SampleResponse | MintError] = {}
    for i, (adapter, job) in enumerate(jobs):
        sampler.add(job, adapter, lambda answer, i=i: answers.__setitem__(i, answer))
    while sampler.step():
        pass
    responses = [answers[i] for i in range(len(jobs))]
    assert all(isinstance(response, SampleResponse) for response in responses), responses
    assert sampler.cache.used == 0, "somebody kept a block"
    return responses  # type: ignore[return-value]


def trainer_logprobs(
    model: BaseModel, adapter: Adapter | None, prompt: Sequence[int], tokens: Sequence[int]
) -> np.ndarray:
    """What `forward` says of the tokens after the prompt."""
    full = [*prompt, *tokens]
    datum = Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:], "weights": [1.0] * (len(full) - 1)})
    adapter = adapter or model.new_adapter(LoraConfig(rank=1))  # a new adapter is the base model
    steps = Trainer(model).forward_backward(adapter, [datum], "cross_entropy", None, backward=False)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]


def check_agreement(model: BaseModel, adapter: Adapter | None, job: SampleRequest, response: SampleResponse) -> None:
    for sequence in response.sequences:
        expected = trainer_logprobs(model, adapter, job.prompt.to_ints(), sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=AGREEMENT, rtol=0)


def adapters(model: BaseModel) -> list[Adapter | None]:
    configs = [LoraConfig(rank=4, seed=1), LoraConfig(rank=2, seed=2, train_mlp=False, train_unembed=False)]
    return [None, *(random_adapter(model, config, seed).snapshot() for seed, config in enumerate(configs))]


# ------------------------------------------------------------------------------------------------ against transformers


def test_greedy_tokens_are_those_of_transformers_generate(model: BaseModel, tiny_folder: Any, family: str) -> None:
    prompt = random_tokens(np.random.default_rng(0), 11)
    reference = plain_model(tiny_folder(family))
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    (response,) = run(Sampler(model, SMALL), (None, request(prompt, max_tokens=30, temperature=0)))
    assert response.sequences[0].tokens == out[0, len(prompt) :].tolist()


def test_seeded_samples_of_a_group_are_those_of_a_plain_loop(model: BaseModel, tiny_folder: Any, family: str) -> None:
    """Each sample alone: one token at a time through PEFT's model, no cache, no batch."""
    adapter = adapters(model)[1]
    assert adapter is not None
    reference = peft_model(tiny_folder(family), adapter)
    prompt = random_tokens(np.random.default_rng(1), 9)
    (response,) = run(Sampler(model, SMALL), (adapter, request(prompt, 3, seed=42, temperature=0.7, max_tokens=8)))
    for index, sequence in enumerate(response.sequences):
        tokens: list[int] = []
        for position in range(8):
            with torch.no_grad():
                probs = torch.softmax(logits(reference, [*prompt, *tokens])[-1].double() / 0.7, -1).numpy()
            u = uniforms(np.array([stream_of(42, index)], dtype=np.uint64), np.array([position]))[0]
            tokens.append(int(np.searchsorted(np.cumsum(probs), u, side="right")))
        assert sequence.tokens == tokens
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 3


# --------------------------------------------------------------------------------------------- agreement with training


def test_logprobs_agree_with_the_trainer_alone_and_in_mixed_company(model: BaseModel) -> None:
    rng = np.random.default_rng(2)
    jobs = [
        (adapter, request(random_tokens(rng, length), n, seed=length, temperature=t, top_p=p))
        for adapter, length, n, t, p in zip(
            adapters(model) * 2, (1, 4, 17, 30, 8, 5), (1, 3, 1, 2, 4, 1), (1.0, 0.5, 2.0, 0.0, 1.0, 1.0),
            (1.0, 0.9, 1.0, 1.0, 0.5, 1.0), strict=True,
        )
    ]  # fmt: skip
    together = run(Sampler(model, SMALL), *jobs)
    for (adapter, job), response in zip(jobs, together, strict=True):
        check_agreement(model, adapter, job, response)
        (alone,) = run(Sampler(model, SMALL), (adapter, job))
        assert [s.tokens for s in alone.sequences] == [s.tokens for s in response.sequences]


def test_logprobs_agree_after_a_prefix_cache_hit(model: BaseModel) -> None:
    adapter = adapters(model)[1]
    prompt = random_tokens(np.random.default_rng(3), 14)
    sampler = Sampler(model, SMALL)
    (first,) = run(sampler, (adapter, request(prompt)))
    turn = request([*prompt, *first.sequences[0].tokens, 5, 6], 2, max_tokens=8)
    (second,) = run(sampler, (adapter, turn))
    assert first.prompt_cache_hit_tokens == 0
    assert second.prompt_cache_hit_tokens == 24  # of 14 + 12 known tokens the last was never read: six full blocks
    check_agreement(model, adapter, turn, second)


def test_chunked_and_whole_prefill_give_the_same(model: BaseModel) -> None:
    rng = np.random.default_rng(4)
    chunked = Limits(block_size=4, blocks=8, max_blocks=256, token_budget=7, max_sequences=4)
    jobs = [(a, request(random_tokens(rng, n), 2, seed=n)) for a, n in zip(adapters(model), (40, 23, 31), strict=True)]
    whole, pieces = run(Sampler(model, SMALL), *jobs), run(Sampler(model, chunked), *jobs)
    for (adapter, job), a, b in zip(jobs, whole, pieces, strict=True):
        assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
        check_agreement(model, adapter, job, b)


def test_preempted_sequences_come_back_as_if_nothing_had_happened(model: BaseModel) -> None:
    rng = np.random.default_rng(5)
    tight = Limits(block_size=4, blocks=2, max_blocks=14, token_budget=64, max_sequences=32)
    jobs = [(a, request(random_tokens(rng, 9), 2, seed=n, max_tokens=30)) for n, a in enumerate(adapters(model))]
    sampler, preempted = Sampler(model, tight), []
    preempt = sampler.scheduler._preempt
    sampler.scheduler._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))  # type: ignore[assignment, func-returns-value]
    crowded, roomy = run(sampler, *jobs), run(Sampler(model, SMALL), *jobs)
    assert len(preempted) > 3
    for (adapter, job), a, b in zip(jobs, crowded, roomy, strict=True):
        assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
        check_agreement(model, adapter, job, a)


def test_equal_prompts_of_one_step_share_what_the_same_step_computes(model: BaseModel) -> None:
    adapter = adapters(model)[1]
    prompt = random_tokens(np.random.default_rng(6), 21)
    jobs = [(adapter, request(prompt, seed=seed)) for seed in range(3)]
    sampler = Sampler(model, SMALL)
    responses = run(sampler, *jobs)
    assert [response.prompt_cache_hit_tokens for response in responses] == [0, 20, 20]
    for (_, job), response in zip(jobs, responses, strict=True):
        check_agreement(model, adapter, job, response)


# --------------------------------------------------------------------------------------------- what a prompt is scored


@pytest.fixture
def llama(tiny_model: Callable[[str], BaseModel]) -> BaseModel:
    return tiny_model("llama")


def plain_logprobs(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Row p - 1 holds the log-probs of position p."""
    with torch.no_grad():
        return torch.log_softmax(logits(plain_model(folder), prompt), -1)[:-1]


@pytest.mark.parametrize("token_budget", [64, 7])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_scores_are_those_of_a_plain_forward(
    llama: BaseModel, tiny_folder: Any, token_budget: int, warm: bool
) -> None:
    rng = np.random.default_rng(7)
    prompt = random_tokens(rng, 26)
    expected = plain_logprobs(tiny_folder("llama"), prompt)
    targets = rng.integers(-1, VOCAB, (25, 3))
    sampler = Sampler(llama, Limits(4, 8, 64, token_budget, 8))
    if warm:
        run(sampler, (None, request(prompt)))
    scored = request(
        prompt, 2, prompt_logprobs=True, topk_prompt_logprobs=4, target_prompt_logprobs=TensorData(targets, "int64")
    )
    (response,) = run(sampler, (None, scored))
    assert response.prompt_cache_hit_tokens == 0, "every position has to be read to be scored"
    assert response.prompt_logprobs is not None and response.prompt_logprobs[0] is None
    at_prompt = expected[range(25), prompt[1:]].numpy()
    np.testing.assert_allclose(response.prompt_logprobs[1:], at_prompt, atol=TOLERANCE)  # type: ignore[arg-type]
    assert response.topk_prompt_logprobs is not None and response.topk_prompt_logprobs[0] is None
    for position, row in enumerate(response.topk_prompt_logprobs[1:]):
        values, ids = expected[position].topk(4)
        assert row is not None and [token for token, _ in row] == ids.tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], values, atol=TOLERANCE)
    assert response.target_prompt_logprobs is not None
    at_targets = np.where(targets < 0, 0.0, np.take_along_axis(expected.numpy(), targets.clip(0), 1))
    np.testing.assert_allclose(response.target_prompt_logprobs.to_numpy(), at_targets, atol=TOLERANCE)


def test_only_the_last_n_are_scored_and_the_rest_comes_from_the_cache(llama: BaseModel, tiny_folder: Any) -> None:
    prompt = random_tokens(np.random.default_rng(8), 26)
    expected = plain_logprobs(tiny_folder("llama"), prompt)[range(25), prompt[1:]].numpy()
    sampler = Sampler(llama, SMALL)
    run(sampler, (None, request(prompt)))
    job = request(prompt, prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=9)
    (response,) = run(sampler, (None, job))
    assert response.prompt_cache_hit_tokens == 16  # position 17 needs the logits of token 16
    assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
    assert response.prompt_logprobs[:17] == [None] * 17 and response.topk_prompt_logprobs[:17] == [None] * 17
    np.testing.assert_allclose(response.prompt_logprobs[17:], expected[16:], atol=TOLERANCE)  # type: ignore[arg-type]


def test_scores_survive_preemption_in_the_middle_of_a_prompt(llama: BaseModel, tiny_folder: Any) -> None:
    rng = np.random.default_rng(9)
    prompt = random_tokens(rng, 30)
    expected = plain_logprobs(tiny_folder("llama"), prompt)[range(29), prompt[1:]].numpy()
    sampler = Sampler(llama, Limits(4, 2, 17, 6, 8))
    older = (None, request(random_tokens(rng, 20), max_tokens=40))
    _, response = run(sampler, older, (None, request(prompt, prompt_logprobs=True)))
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=TOLERANCE)  # type: ignore[arg-type, index]


def test_alternative_tokens_follow_the_tempered_distribution(llama: BaseModel, tiny_folder: Any) -> None:
    prompt = random_tokens(np.random.default_rng(10), 4)
    expected = plain_logprobs(tiny_folder("llama"), prompt)
    job = request(prompt, prompt_alt_tokens_k=1000, temperature=1.5, top_k=1)
    (response,) = run(Sampler(llama, SMALL), (None, job))
    assert response.prompt_alt_tokens is not None
    tokens, logprobs = (x.to_numpy() for x in (response.prompt_alt_tokens.tokens, response.prompt_alt_tokens.logprobs))
    assert tokens.shape == logprobs.shape == (3, 1000)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected.numpy(), tokens, 1), atol=TOLERANCE)
    for row in range(3):
        share = np.bincount(tokens[row], minlength=VOCAB) / 1000
        probs = torch.softmax(expected[row] / 1.5, -1).numpy()
        assert np.abs(share - probs).max() < 4 * 0.5 / np.sqrt(1000)  # four standard deviations of the widest cell


def test_a_prompt_of_one_token_can_be_scored(llama: BaseModel) -> None:
    (response,) = run(Sampler(llama, SMALL), (None, request([5], prompt_logprobs=True, prompt_alt_tokens_k=2)))
    assert response.prompt_logprobs == [None]
    assert response.prompt_alt_tokens is not None and response.prompt_alt_tokens.tokens.shape == [0, 2]


def test_topk_of_samples_is_each_requests_own(llama: BaseModel) -> None:
    prompts = ([5, 6, 7], [8, 9])
    options = {"temperature": 0, "max_tokens": 4}
    jobs = [(None, request(p, topk_sample_logprobs=k, **options)) for p, k in zip(prompts, (3, 0), strict=True)]
    with_topk, without = run(Sampler(llama, SMALL), *jobs)
    sequence = with_topk.sequences[0]
    assert without.sequences[0].topk_logprobs is None
    assert sequence.topk_logprobs is not None and [len(row) for row in sequence.topk_logprobs] == [3] * 4
    assert [row[0][0] for row in sequence.topk_logprobs] == sequence.tokens  # greedy takes the best
    assert [row[0][1] for row in sequence.topk_logprobs] == pytest.approx(sequence.logprobs)


# ------------------------------------------------------------------------------------------------------ how it is ended


def sampled(model: BaseModel, **options: Any) -> tuple[list[int], str]:
    (response,) = run(Sampler(model, SMALL), (None, request([5, 6, 7], **options)))
    return response.sequences[0].tokens, response.sequences[0].stop_reason


def test_stop_ids_end_a_sample_and_are_included(llama: BaseModel) -> None:
    tokens, reason = sampled(llama)
    assert reason == "length" and len(tokens) == 12
    stop = tokens[5]
    assert sampled(llama, stop=[stop]) == (tokens[: tokens.index(stop) + 1], "stop")
    assert sampled(llama, stop=None, stop_token_ids=[stop]) == (tokens[: tokens.index(stop) + 1], "stop")


def test_the_end_token_stops_unless_every_stop_is_off(llama: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, _ = sampled(llama)
    end = tokens[4]
    monkeypatch.setitem(llama.__dict__, "eos_ids", frozenset([end]))
    expected = tokens[: tokens.index(end) + 1], "stop"
    assert sampled(llama, stop=None) == expected
    assert sampled(llama, stop=[next(t for t in range(VOCAB) if t not in tokens)]) == expected
    assert sampled(llama, stop=[]) == (tokens, "length")


class Letters:
    """A tokenizer by hand: token i is one letter twice, or, from 52 on, one byte of the two-byte letter 'é'."""

    def decode(self, ids: list[int], **_: object) -> str:
        pieces = [chr(97 + i % 26).encode() * 2 if i < 52 else "é".encode()[i % 2 : i % 2 + 1] for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


def test_stop_strings_may_span_tokens_and_end_inside_one() -> None:
    stops = StopText(["bcc", "éd"], Letters(), prompt=[1])
    assert [stops.push(token) for token in (0, 1, 2)] == [False, False, True]  # aa bb c|c
    stops = StopText(["bcc", "éd"], Letters(), prompt=[1])
    assert [stops.push(token) for token in (52, 53, 3)] == [False, False, True]  # two halves of é, then dd


def test_a_stop_string_never_begins_in_the_prompt() -> None:
    stops = StopText(["bbaa"], Letters(), prompt=[1, 1])
    assert [stops.push(token) for token in (0, 1, 0)] == [False, False, True]


def test_stop_strings_are_found_after_broken_characters() -> None:
    stops = StopText(["xx"], Letters(), prompt=[53])
    assert not any(stops.push(53) for _ in range(40))
    assert stops.push(23)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 60), max_size=40), st.text("abcé", min_size=1, max_size=5))
def test_stop_strings_are_found_as_in_the_whole_text(tokens: list[int], stop: str) -> None:
    stops = StopText([stop], Letters(), prompt=[0])
    for count, token in enumerate(tokens, 1):
        found = stops.push(token)
        assert found == (stop in Letters().decode(tokens[:count]))
        if found:
            return


def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it(
    llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(llama.__dict__, "tokenizer", Letters())
    tokens, _ = sampled(llama, seed=3)
    text = Letters().decode(tokens[4:7])
    stop = text[1:-1]
    cut = next(n for n in range(1, 13) if stop in Letters().decode(tokens[:n]))
    assert sampled(llama, seed=3, stop=stop) == (tokens[:cut], "stop")


# --------------------------------------------------------------------------------------------- the life of a request


def test_a_seed_repeats_itself_and_no_seed_does_not(llama: BaseModel) -> None:
    assert sampled(llama, seed=5) == sampled(llama, seed=5)
    assert sampled(llama, seed=5) != sampled(llama, seed=6)
    assert sampled(llama, seed=None) != sampled(llama, seed=None)


def test_the_first_samples_of_a_larger_group_are_those_of_a_smaller(llama: BaseModel) -> None:
    few, many = (run(Sampler(llama, SMALL), (None, request([5, 6], n)))[0] for n in (3, 20))
    assert [s.tokens for s in many.sequences[:3]] == [s.tokens for s in few.sequences]


def test_a_group_larger_than_the_machine_comes_in_waves(llama: BaseModel) -> None:
    narrow = Limits(block_size=4, blocks=8, max_blocks=256, token_budget=64, max_sequences=8)
    sampler = Sampler(llama, narrow)
    prompt = list(range(9))
    (response,) = run(sampler, (None, request(prompt, 21)))
    (reference,) = run(Sampler(llama, SMALL), (None, request(prompt, 21)))
    assert [s.tokens for s in response.sequences] == [s.tokens for s in reference.sequences]
    assert sampler.tokens_read == 9 + 10 * 1 + 21 * 11  # eleven waves of two: only the first reads the whole prompt


def test_a_groups_prompt_is_read_once(llama: BaseModel) -> None:
    sampler = Sampler(llama, SMALL)
    run(sampler, (None, request(list(range(30)), 8, max_tokens=3)))
    assert sampler.tokens_read == 30 + 8 * 2
    assert sampler.tokens_sampled == 8 * 3


def test_tokens_are_reported_as_they_come(llama: BaseModel) -> None:
    heard: dict[int, tuple[list[int], list[float]]] = {0: ([], []), 1: ([], [])}
    answers: list[Any] = []

    def listen(index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        heard[index][0].extend(tokens)
        heard[index][1].extend(logprobs)

    sampler = Sampler(llama, SMALL)
    sampler.add(request([5, 6], 2), None, answers.append, listen)
    sampler.step()
    assert all(len(tokens) == 1 for tokens, _ in heard.values())
    while sampler.step():
        pass
    assert [(s.tokens, s.logprobs) for s in answers[0].sequences] == [heard[0], heard[1]]


def test_a_cancelled_request_frees_its_blocks_and_says_nothing(llama: BaseModel) -> None:
    sampler, answers = Sampler(llama, SMALL), []
    group = sampler.add(request([5, 6, 7], 4), None, answers.append)
    waiting = sampler.add(request([1] * 9), None, answers.append)
    sampler.step()
    sampler.cancel(group)
    sampler.cancel(waiting)
    sampler.cancel(group)
    assert not sampler.has_work and sampler.cache.used == 0 and answers == []


def test_what_one_policy_computed_is_never_another_ones_prefix(llama: BaseModel) -> None:
    _, first, second = adapters(llama)
    prompt = list(range(20))
    sampler = Sampler(llama, SMALL)
    run(sampler, (first, request(prompt)))
    for other in (second, None):
        (response,) = run(sampler, (other, request(prompt)))
        assert response.prompt_cache_hit_tokens == 0
        check_agreement(llama, other, request(prompt), response)


def test_a_forgotten_policys_prefixes_go(llama: BaseModel) -> None:
    adapter = adapters(llama)[1]
    assert adapter is not None
    sampler = Sampler(llama, SMALL)
    run(sampler, (adapter, request(list(range(20)))))
    sampler.forget(adapter)
    (response,) = run(sampler, (adapter, request(list(range(20)))))
    assert response.prompt_cache_hit_tokens == 0


def test_a_diverged_policy_fails_alone(llama: BaseModel) -> None:
    good, bad = adapters(llama)[1:]
    assert good is not None and bad is not None
    for down, _ in bad.weights.values():
        down.fill_(torch.nan)
    sampler, answers = Sampler(llama, Limits(4, 4, 24, 64, 8)), {}
    job = request(list(range(9)), 2)
    (alone,) = run(Sampler(llama, SMALL), (good, job))
    for round in range(3):  # again and again over the blocks the bad one had written to
        sampler.add(job, bad, lambda answer: answers.__setitem__("bad", answer))
        sampler.add(job, good, lambda answer: answers.__setitem__("good", answer))
        while sampler.step():
            pass
        assert isinstance(answers["bad"], Internal) and "diverged" in str(answers["bad"])
        assert [s.tokens for s in answers["good"].sequences] == [s.tokens for s in alone.sequences], round
        sampler.forget(good)


def test_after_a_failed_step_the_sampler_goes_on(llama: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, answers = Sampler(llama, SMALL), []
    sampler.add(request(list(range(9)), 3), None, answers.append)
    sampler.step()
    with monkeypatch.context() as broken:
        broken.setattr(sampler.runner, "run", lambda _: 1 / 0)
        sampler.add(request(list(range(12))), None, answers.append)
        with pytest.raises(ZeroDivisionError):
            sampler.step()
    sampler.abort(Internal("no"))
    assert [str(answer) for answer in answers] == ["no", "no"] and sampler.cache.used == 0
    (response,) = run(sampler, (None, request(list(range(12)))))
    assert response.prompt_cache_hit_tokens == 0, "nothing the failed step had promised may be found"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (lambda: request([]), "prompt is empty"),
        (lambda: request([1, 2, VOCAB]), f"id {VOCAB} at position 2.*0 to {VOCAB - 1}"),
        (lambda: request([1, -1]), "id -1 at position 1"),
        (lambda: request([1] * 60, max_tokens=6), "60 tokens and max_tokens=6.*context of 64.*at most 5"),
        (lambda: request([1] * 65, max_tokens=None), "65 tokens.*context of 64"),
        (lambda: request([1], 0), "num_samples is 0"),
        (lambda: request([1], stop=[VOCAB]), f"stop holds token id {VOCAB}"),
        (lambda: request([1], topk_prompt_logprobs=-1), "topk_prompt_logprobs is -1"),
        (lambda: request([1, 2], prompt_logprobs_last_n=1), "without prompt_logprobs"),
        (lambda: request([1, 2], prompt_logprobs=True, prompt_logprobs_last_n=-1), "last_n is -1"),
        (lambda: request([1, 2], target_prompt_logprobs=TensorData([[1], [1]], "int64")), r"shape \[2, 1\].*\[1, K\]"),
        (lambda: request([1, 2], target_prompt_logprobs=TensorData([[VOCAB]], "int64")), f"id {VOCAB} at position 0"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused_with_its_figures(
    llama: BaseModel, job: Callable[[], SampleRequest], message: str
) -> None:
    sampler = Sampler(llama, SMALL)
    with pytest.raises(BadRequest, match=message):
        sampler.add(job(), None, lambda answer: None)
    assert not sampler.has_work


def test_a_sequence_that_could_never_fit_is_refused_and_one_that_just_fits_runs(llama: BaseModel) -> None:
    tight = Limits(block_size=4, blocks=5, max_blocks=5, token_budget=64, max_sequences=8)
    sampler = Sampler(llama, tight)
    with pytest.raises(BadRequest, match=r"10 tokens and max_tokens is 12.*holds 20 tokens"):
        sampler.add(request([1] * 10, max_tokens=12), None, lambda answer: None)
    (response,) = run(sampler, (None, request([1] * 10, 3, max_tokens=11)))
    assert [len(s.tokens) for s in response.sequences] == [11] * 3
    (response,) = run(sampler, (None, request([1] * 10, max_tokens=None)))
    assert len(response.sequences[0].tokens) == 11  # as many as there is room for


def test_max_tokens_left_out_goes_to_the_end_of_the_context(llama: BaseModel) -> None:
    tokens, reason = sampled(llama, max_tokens=None)
    assert len(tokens) == 62 and reason == "length"  # 64 are read, the last one drawn is not
