"""Penalties, biases and grammars: against transformers' generate, plain loops and Python's own re and json."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from reference import logits, plain_model, random_tokens
from test_sampler import SMALL, check_agreement, request, run
from tiny_models import VOCAB

from mint.engine.engine import Engine
from mint.engine.model import BaseModel
from mint.engine.sampler.sampler import Sampler
from mint.errors import BadRequest
from mint.types import ModelInput, SampledSequence, SampleRequest, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 5, 5]
TINY = "mint/tiny"
LIMIT = 48
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


# ------------------------------------------------------------------------------------------------- penalties and biases


def generated(folder: Path, **options: Any) -> list[int]:
    out = plain_model(folder).generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return out[0, len(PROMPT) :].tolist()


def greedy(model: BaseModel, **options: Any) -> list[int]:
    (response,) = run(Sampler(model, SMALL), (None, request(PROMPT, max_tokens=30, temperature=0, **options)))
    return response.sequences[0].tokens


@pytest.mark.parametrize("penalty", [1.7, 0.6])
def test_the_repetition_penalty_is_that_of_transformers(
    model: BaseModel, tiny_folder: Any, family: str, penalty: float
) -> None:
    expected = generated(tiny_folder(family), repetition_penalty=penalty)
    assert greedy(model, repetition_penalty=penalty) == expected != greedy(model)


def test_a_bias_is_that_of_transformers(model: BaseModel, tiny_folder: Any, family: str) -> None:
    first = greedy(model)[0]
    bias = {first: -100.0, 3: 1.5, 11: -2.0}
    expected = generated(tiny_folder(family), sequence_bias={(token,): value for token, value in bias.items()})
    found = greedy(model, logit_bias=bias)
    assert found == expected and first not in found


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 1.2), (-0.5, 2.0)])
def test_what_was_said_before_counts_as_in_a_plain_loop(
    tiny_model: Any, tiny_folder: Any, presence: float, frequency: float
) -> None:
    """OpenAI's formula; the prompt does not count."""
    reference = plain_model(tiny_folder("qwen3"))
    said: list[int] = []
    for _ in range(30):
        with torch.no_grad():
            values = logits(reference, [*PROMPT, *said])[-1].tolist()
        counts = Counter(said)
        values = [value - (presence + frequency * counts[t] if counts[t] else 0) for t, value in enumerate(values)]
        said.append(values.index(max(values)))
    assert greedy(tiny_model("qwen3"), presence_penalty=presence, frequency_penalty=frequency) == said


def test_log_probs_stay_those_of_the_policy(tiny_model: Any) -> None:
    model = tiny_model("llama")
    steering = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {4: 3.0}}
    job = request(PROMPT, 4, temperature=0.9, top_p=0.9, topk_sample_logprobs=3, **steering)
    (response,) = run(Sampler(model, SMALL), (None, job))
    check_agreement(model, None, job, response)
    for row in response.sequences[0].topk_logprobs or []:
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)


def test_steered_samples_and_others_do_not_see_each_other(tiny_model: Any) -> None:
    """Alone or together, in few blocks so that some give way and are read again: the same tokens."""
    rng = np.random.default_rng(3)
    jobs = [
        request(random_tokens(rng, 9), 3, max_tokens=20, repetition_penalty=1.4),
        request(random_tokens(rng, 14), 2, max_tokens=20),
        request(random_tokens(rng, 5), 3, max_tokens=20, frequency_penalty=1.0, top_k=5),
    ]
    model = tiny_model("qwen3")
    alone = [run(Sampler(model, SMALL), (None, job))[0] for job in jobs]
    together = run(Sampler(model, SMALL), *((None, job) for job in jobs))
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


def test_a_bias_for_a_token_that_is_not_there_is_refused(tiny_model: Any) -> None:
    with pytest.raises(BadRequest, match=f"logit_bias holds token id {VOCAB}; ids run from 0 to {VOCAB - 1}"):
        Sampler(tiny_model("llama"), SMALL).add(request(PROMPT, logit_bias={VOCAB: 1.0}), None, lambda answer: None)


# ------------------------------------------------------------------------------------------------------------ grammars


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine([TINY])
    engine.load_policy("base", TINY, None).result(60)
    yield engine
    engine.close()


def answers(engine: Engine, n: int = 24, prompt: str = "Q: 17 + 25 = ?\nA:", **options: Any) -> list[SampledSequence]:
    params = SamplingParams(**{"max_tokens": LIMIT, "seed": 5, **options})
    ask = SampleRequest(ModelInput.from_ints(tokenizer(engine).encode(prompt)), params, n)
    return engine.sample("base", ask).result(60).sequences


def tokenizer(engine: Engine) -> Any:
    return engine._runtimes[TINY].model.tokenizer


def text(engine: Engine, sequence: SampledSequence) -> str:
    return tokenizer(engine).decode(sequence.tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "regex",
    [r"[0-9]{2,4}", r"(yes|no), because (it is|they are) [a-z]{3,6}\.", r"-?(0|[1-9]\d*)(\.\d{2})?", "né[à-ü]{1,3}"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_answers_match_their_regular_expression(engine: Engine, regex: str, temperature: float) -> None:
    found = answers(engine, regex=regex, temperature=temperature)
    ended = [text(engine, sequence) for sequence in found if sequence.stop_reason == "stop"]
    assert ended and all(re.fullmatch(regex, answer) for answer in ended), ended
    assert temperature == 0 or len(set(ended)) > 1
    eos = engine._runtimes[TINY].model.eos_ids
    for sequence in found:
        assert (sequence.tokens[-1] in eos) == (sequence.stop_reason == "stop")
        assert len(sequence.tokens) <= LIMIT


def test_answers_are_the_json_their_schema_allows(engine: Engine) -> None:
    for sequence in answers(engine, json_schema=PERSON, max_tokens=200):
        assert sequence.stop_reason == "stop"
        person = json.loads(text(engine, sequence))
        assert set(person) == {"name", "age"}
        assert person["name"] in ("Ada", "Grace") and type(person["age"]) is int and 0 <= person["age"] <= 150


def test_an_empty_answer_may_be_all_that_matches(engine: Engine) -> None:
    (sequence,) = answers(engine, 1, regex="")
    assert text(engine, sequence) == "" and len(sequence.tokens) == 1


def test_a_grammar_leaves_the_choice_to_the_policy(engine: Engine) -> None:
    """Shares of samples against the policy's own probabilities, renormalised over what is allowed."""
    prompt = tokenizer(engine).encode("Q: 17 + 25 = ?\nA:")
    digits = [tokenizer(engine).encode(str(d))[-1] for d in range(10)]
    drawn = Counter(sequence.tokens[0] for sequence in answers(engine, 4000, regex="[0-9]", max_tokens=1))
    model = engine._runtimes[TINY].model
    with torch.no_grad():
        probs = torch.softmax(logits(plain_model(Path(model.facts.folder)), prompt)[-1][digits].double(), -1).numpy()
    assert set(drawn) <= set(digits)
    np.testing.assert_allclose([drawn[token] / 4000 for token in digits], probs, atol=4 * 0.5 / np.sqrt(4000))


def test_grammars_meet_penalties_and_filters(engine: Engine) -> None:
    for sequence in answers(engine, regex="[ab]{20}", frequency_penalty=2.0, top_k=40):
        counts = Counter(text(engine, sequence))
        assert sequence.stop_reason == "stop" and set(counts) == {"a", "b"} and counts["a"] + counts["b"] == 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "((("}, "the regex cannot be followed.*unclosed group"),
        ({"json_schema": {"type": "nonsense"}}, "the json_schema cannot be followed"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "the json_schema cannot be followed.*uniqueItems"),
        ({"regex": r"(?=a)b"}, "the regex cannot be followed"),
        ({"regex": "((a{1000}){1000}){1000}"}, "the regex cannot be followed.*too many expressions"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "the json_schema cannot be followed.*does not fetch"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_and_nobody_else_notices(
    engine: Engine, given: dict[str, Any], message: str
) -> None:
    before = answers(engine, 2)
    with pytest.raises(BadRequest, match=f"(?s){message}"):
        answers(engine, **given)
    assert [s.tokens for s in answers(engine, 2)] == [s.tokens for s in before]


def test_an_answer_that_cannot_go_on_fails_with_the_reason_alone(engine: Engine) -> None:
    """A vocabulary without the character that has to come: the others in the batch finish."""
    grammars = engine._runtimes[TINY].grammars
    backend = json.loads(grammars._model.tokenizer.backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"]
    vocabulary["<gone>"] = vocabulary.pop("z")
    grammars.__dict__["_tokenizer"] = LLTokenizer(
        json.dumps(backend), n_vocab=grammars._model.facts.vocab_size, eos_token=sorted(grammars._model.eos_ids)
    )
    grammars._compiled.clear()
    try:
        others = engine.sample(
            "base", SampleRequest(ModelInput.from_ints(PROMPT), SamplingParams(max_tokens=30, stop=[]))
        )
        with pytest.raises(BadRequest, match="no token continues the answer in the sense of the regex, after 2 tokens"):
            answers(engine, regex="xyz")
        assert len(others.result(60).sequences[0].tokens) == 30
    finally:
        del grammars.__dict__["_tokenizer"]
        grammars._compiled.clear()


def test_a_model_without_a_tokenizer_says_so(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("llama"))
    engine = Engine([folder])
    try:
        engine.load_policy("p", folder, None).result(60)
        with pytest.raises(BadRequest, match="has no tokenizer of the tokenizers library"):
            engine.sample("p", SampleRequest(ModelInput.from_ints(PROMPT), SamplingParams(regex="a"))).result(60)
    finally:
        engine.close()
