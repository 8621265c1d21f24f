import asyncio
import json

import httpx
import numpy as np
import pytest

from mint.errors import BadRequest, RequestFailed
from mint.rl.completers import EndpointMessageCompleter, SamplingMessageCompleter, SamplingTokenCompleter
from mint.rl.renderers import ChatRenderer, PlainRenderer
from mint.types import ModelInput, SampledSequence, SampleResponse, SamplingParams
from tests.rl.fakes import ALPHABET, CharTokenizer, FakeSamplingClient

PROMPT = ModelInput.from_ints([1, 2, 3])


def client(seed: int = 0) -> FakeSamplingClient:
    return FakeSamplingClient(np.random.default_rng(seed).normal(size=(len(ALPHABET), len(ALPHABET))))


def test_parameters_reach_the_client() -> None:
    sampler = client()
    action = asyncio.run(SamplingTokenCompleter(sampler, max_tokens=5, temperature=0.7)(PROMPT, ["x", 7]))
    ((prompt, count, params),) = sampler.requests
    assert (prompt, count) == (PROMPT, 1)
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (5, 0.7, ["x", 7], None)
    assert len(action.logprobs) == len(action.tokens)


def test_the_tightest_token_limit_holds() -> None:
    sampler = client()
    policy = SamplingTokenCompleter(sampler, max_tokens=50, context_window=20)
    asyncio.run(policy(PROMPT, None))
    asyncio.run(policy(PROMPT, None, max_tokens=4))
    assert [params.max_tokens for _, _, params in sampler.requests] == [17, 4]
    with pytest.raises(BadRequest, match="prompt has 3 tokens and the context window 3"):
        asyncio.run(SamplingTokenCompleter(sampler, max_tokens=5, context_window=3)(PROMPT, None))


def seeds(policy: SamplingTokenCompleter, calls: int) -> list[int | None]:
    sampler = policy.sampling_client
    before = len(sampler.requests)  # type: ignore[attr-defined]
    for _ in range(calls):
        asyncio.run(policy(PROMPT, None))
    return [params.seed for _, _, params in sampler.requests[before:]]  # type: ignore[attr-defined]


def test_a_seed_gives_every_member_and_call_a_stream_of_its_own() -> None:
    policy = SamplingTokenCompleter(client(), max_tokens=3, seed=11)
    streams = [seeds(policy.for_member(*who), 3) for who in ((0, 0), (0, 1), (1, 0))] + [seeds(policy, 3)]
    drawn = [seed for stream in streams for seed in stream]
    assert len(set(drawn)) == len(drawn)
    again = SamplingTokenCompleter(client(), max_tokens=3, seed=11)
    assert seeds(again.for_member(1, 0), 3) == streams[2]


def test_many_completions_are_one_request() -> None:
    sampler = client()
    actions = asyncio.run(SamplingTokenCompleter(sampler, max_tokens=8, seed=1).complete_many(PROMPT, None, 6))
    assert len(actions) == 6
    assert [count for _, count, _ in sampler.requests] == [6]
    assert len({tuple(action.tokens) for action in actions}) > 1


def test_a_service_without_logprobs_is_an_error() -> None:
    class Mute:
        async def sample_async(self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams) -> object:
            return SampleResponse([SampledSequence([1, 2], None, "stop")])

    with pytest.raises(RequestFailed, match="no log-probs"):
        asyncio.run(SamplingTokenCompleter(Mute(), max_tokens=3)(PROMPT, None))  # type: ignore[arg-type]


def test_messages_go_through_the_renderer() -> None:
    table = np.full((len(ALPHABET), len(ALPHABET)), -30.0)
    for a, b in zip(">yes", "yes\x00", strict=True):
        table[ALPHABET.index(a), ALPHABET.index(b)] = 30.0
    judge = SamplingMessageCompleter(FakeSamplingClient(table), ChatRenderer(CharTokenizer()), max_tokens=9)
    assert asyncio.run(judge([{"role": "user", "content": "ok?"}])) == {"role": "assistant", "content": "yes"}


def test_an_endpoint_is_asked_in_openais_words() -> None:
    seen = {}

    def answer(request: httpx.Request) -> httpx.Response:
        seen.update(url=str(request.url), key=request.headers["authorization"], body=json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": "B"}}]})

    judge = EndpointMessageCompleter("http://judge/v1/", "m", "k", 7, transport=httpx.MockTransport(answer))
    assert asyncio.run(judge([{"role": "user", "content": "?"}]))["content"] == "B"
    assert (seen["url"], seen["key"]) == ("http://judge/v1/chat/completions", "Bearer k")
    assert seen["body"] == {
        "model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 7, "temperature": 0.0,
    }  # fmt: skip


def test_an_endpoint_that_refuses_says_what() -> None:
    refuse = httpx.MockTransport(lambda request: httpx.Response(401, text="no such key"))
    with pytest.raises(RequestFailed, match="answered 401 for 'm': no such key"):
        asyncio.run(EndpointMessageCompleter("http://judge/v1", "m", transport=refuse)([]))


@pytest.mark.parametrize(
    ("response", "text", "ended"),
    [("8\x00", "8", True), ("8\nQ: more", "8", True), ("8", "8", False), ("", "", False)],
)
def test_plain_text_ends_at_the_end_token_or_a_stop_string(response: str, text: str, ended: bool) -> None:
    renderer = PlainRenderer(CharTokenizer(), ("\nQ:",))
    tokens = CharTokenizer().encode(response)
    assert renderer.parse_response(tokens) == ({"role": "assistant", "content": text}, ended)
    assert renderer.get_stop_sequences() == ["\nQ:", 0]


def test_a_chat_turn_rendered_again_extends_what_was_sampled() -> None:
    renderer, tokenizer = ChatRenderer(CharTokenizer()), CharTokenizer()
    asked = [{"role": "user", "content": "2+2?"}]
    action = tokenizer.encode("<tool_call>2+2</tool_call>\x00")
    message, ended = renderer.parse_response(action)
    assert ended
    before = renderer.build_generation_prompt(asked).to_ints() + action
    after = renderer.build_generation_prompt([*asked, message, {"role": "tool", "content": "4"}]).to_ints()
    assert after[: len(before)] == before
