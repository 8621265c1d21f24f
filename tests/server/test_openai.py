"""The OpenAI-compatible routes, through the official openai client and raw where it cannot say it."""

import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from mint.chat import FolderTokenizer
from tests.fakes import TINY
from tests.server.live import Live

END = 258  # <|im_end|> of mint/tiny
TOKENIZER = FolderTokenizer(TINY)
HELLO = [{"role": "user", "content": "Say hi"}]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="sk-any", max_retries=0) as made:
        yield made


def say(live: Live, text: str, end: bool = True) -> None:
    live.backend.words = TOKENIZER.encode(text) + ([END] if end else [])


def test_models_are_base_models_and_saved_sampler_weights(live: Live, client: openai.OpenAI) -> None:
    model = live.model()
    live.save(model, 1, "state")
    path = live.save(model, 2, "one", "save_weights_for_sampler")
    assert [m.id for m in client.models.list()] == ["mint/tiny", path]
    assert client.models.retrieve("mint/tiny").id == "mint/tiny"


def test_a_chat_is_rendered_by_the_template_and_answered_without_the_end_token(
    live: Live, client: openai.OpenAI
) -> None:
    reply = client.chat.completions.create(model="mint/tiny", messages=HELLO, n=2, seed=3, temperature=0.5, top_p=0.9)
    assert [c.message.content for c in reply.choices] == ["Hi", "Hi"]
    assert reply.choices[0].finish_reason == "stop"
    request = live.backend.calls[-1][2]
    prompt = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt.to_ints() == TOKENIZER.encode(prompt)
    params = request.sampling_params
    assert (params.seed, params.temperature, params.top_p, params.stop, params.max_tokens) == (3, 0.5, 0.9, [END], None)
    assert reply.usage.prompt_tokens == len(request.prompt.to_ints())
    assert reply.usage.completion_tokens == 6


def test_a_saved_checkpoint_answers_with_its_own_weights(live: Live, client: openai.OpenAI) -> None:
    model = live.model()
    live.step(model, 1)
    path = live.save(model, 2, "one", "save_weights_for_sampler")
    reply = client.chat.completions.create(model=path, messages=HELLO, logprobs=True)
    assert reply.choices[0].logprobs.content[0].logprob == -1.5


def test_chat_logprobs_leave_out_the_end_token(live: Live, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="mint/tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in content] == [("H", -0.5), ("i", -0.5)]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9.0]


def test_a_length_limit_under_either_name_is_told(live: Live, client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 1}, {"max_completion_tokens": 1}):
        reply = client.chat.completions.create(model="mint/tiny", messages=HELLO, **limit)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("H", "length")


def test_text_stops_before_the_stop_string(live: Live, client: openai.OpenAI) -> None:
    say(live, "one, two STOP", end=False)
    reply = client.chat.completions.create(model="mint/tiny", messages=HELLO, stop=["STOP"])
    assert reply.choices[0].message.content == "one, two "
    stream = client.chat.completions.create(model="mint/tiny", messages=HELLO, stop="STOP", stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "one, two "


def test_a_stream_is_the_same_text_in_pieces_with_usage_at_the_end(live: Live, client: openai.OpenAI) -> None:
    say(live, "héllo ∑!")
    stream = client.chat.completions.create(
        model="mint/tiny", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    texts, reasons, usage, scored = {0: "", 1: ""}, {}, None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scored += len(choice.logprobs.content) if choice.logprobs else 0
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "héllo ∑!", 1: "héllo ∑!"}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == 2 * len(live.backend.words)
    assert scored == 2 * (len(live.backend.words) - 1)


def test_tokens_are_streamed_while_the_sample_runs(live: Live) -> None:
    """The first piece must arrive although the sample never ends."""
    live.http.post(f"{live.url}/v1/completions", json={"model": "mint/tiny", "prompt": "x", "max_tokens": 2})
    whole = live.backend.sample

    def endless(policy, request, on_tokens=None):
        live.backend.hold()
        future = whole(policy, request)
        on_tokens(0, [72], [-0.5])
        return future

    live.backend.sample = endless
    body = {"model": "mint/tiny", "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        seen = [json.loads(next(line for line in lines if line).removeprefix("data: ")) for _ in range(2)]
    assert seen[1]["choices"][0]["delta"]["content"] == "H"


def test_tools_reach_the_template_and_calls_come_back(live: Live, client: openai.OpenAI) -> None:
    say(live, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    reply = client.chat.completions.create(model="mint/tiny", messages=HELLO, tools=tools)
    [call] = reply.choices[0].message.tool_calls
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    stream = client.chat.completions.create(model="mint/tiny", messages=HELLO, tools=tools, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert [d.tool_calls[0].function.name for d in deltas if d.tool_calls] == ["add"]
    plain = client.chat.completions.create(model="mint/tiny", messages=HELLO, tools=tools, tool_choice="none")
    assert plain.choices[0].message.tool_calls is None


def test_tool_results_and_text_parts_are_rendered(live: Live, client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    client.chat.completions.create(model="mint/tiny", messages=messages)
    prompt = TOKENIZER.decode(live.backend.calls[-1][2].prompt.to_ints())
    assert "Say hi" in prompt
    assert "<tool_response>2</tool_response>" in prompt


def test_completions_take_text_tokens_and_several_prompts(live: Live, client: openai.OpenAI) -> None:
    for prompt, choices in (("ab", 1), ([97, 98], 1), (["a", "b"], 2), ([[97], [98]], 2)):
        reply = client.completions.create(model="mint/tiny", prompt=prompt)
        assert [c.text for c in reply.choices] == ["Hi"] * choices
    assert live.backend.calls[-1][2].sampling_params.max_tokens == 16


def test_echo_scores_the_prompt_even_when_nothing_is_generated(live: Live, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="mint/tiny", prompt="abc", echo=True, logprobs=1, max_tokens=0)
    [choice] = reply.choices
    assert choice.text == "abc"
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, pytest.approx(-0.98), pytest.approx(-0.99)]
    assert choice.logprobs.text_offset == [0, 1, 2]
    both = client.completions.create(model="mint/tiny", prompt="a", echo=True, logprobs=0).choices[0]
    assert (both.text, both.logprobs.tokens) == ("aHi", ["a", "H", "i"])


def test_completions_stream(live: Live, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="mint/tiny", prompt=["a", "b"], stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "Hi", 1: "Hi"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"beam_width": 3}}, "beam_width"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 5000}, "context of 1024"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts only"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_in_openais_shape(
    live: Live, client: openai.OpenAI, change: dict, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**({"model": "mint/tiny", "messages": HELLO} | change))
    assert said in refused.value.body["message"]
    assert refused.value.body["type"] == "invalid_request_error"


def test_harmless_parameters_are_let_through(live: Live, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="mint/tiny", messages=HELLO, user="me", presence_penalty=0, logit_bias={}, metadata={"a": "b"}
    )


def test_an_unknown_model_is_404_and_a_wrong_key_401(serve, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="mint/tiny"):
        client.chat.completions.create(model="no/such", messages=HELLO)
    locked = serve(keys=("sk-me",))
    with pytest.raises(openai.AuthenticationError, match="MINT_API_KEY"):
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-you", max_retries=0).models.list()


def test_a_client_that_leaves_frees_its_sample(live: Live) -> None:
    live.sampler()
    live.backend.hold()
    cancelled = []
    whole = live.backend.sample

    def watched(*args):
        future = whole(*args)
        future.add_done_callback(lambda f: cancelled.append(f.cancelled()))
        return future

    live.backend.sample = watched
    for stream in (False, True):
        body = {"model": "mint/tiny", "messages": HELLO, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=0.3)
    deadline = time.time() + 5
    while len(cancelled) < 2 and time.time() < deadline:
        time.sleep(0.02)
    assert cancelled == [True, True]
