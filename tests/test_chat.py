"""The folder tokenizer against transformers' own, tool calls, and text that comes in pieces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint.chat import (
    FolderTokenizer,
    Reply,
    TextStream,
    ToolCall,
    cut_at_stop,
    decode_chat,
    encode_chat,
    parse_tool_calls,
    turn_end_tokens,
)
from mint.errors import BadRequest, NotFound
from tests.fakes import TINY

OURS = FolderTokenizer(TINY)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1 = ? éß ∑"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "thanks"},
]

# A template with what the wild has: tools, loop controls, generation marks, dates, nested JSON.
WILD = """
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'bad' %}{{ raise_exception('no ' + message.role) }}{% endif %}
    {{- bos_token }}{{ message.role }}: {% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant ({{ mood | default('calm') }}, {{ strftime_now('%Y') }}): {% endif %}"""


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@given(st.text(max_size=40))
def test_text_and_tokens_are_transformers(theirs, text: str) -> None:
    ids = OURS.encode(text)
    assert ids == theirs.encode(text)
    assert OURS.decode(ids) == theirs.decode(ids)


def test_templates_render_as_in_transformers(theirs) -> None:
    for options in ({}, {"add_generation_prompt": True}):
        assert OURS.apply_chat_template(TALK, **options) == theirs.apply_chat_template(
            TALK, return_dict=False, **options
        )
    assert encode_chat(OURS, TALK) == encode_chat(theirs, TALK)


def test_a_wild_template_renders_as_in_transformers(theirs, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    special = '{"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}'
    (tmp_path / "tokenizer_config.json").write_text(special)
    (tmp_path / "chat_template.jinja").write_text(WILD)
    ours = FolderTokenizer(tmp_path)
    talk = [*TALK, {"role": "skip", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    options = {"tools": tools, "add_generation_prompt": True, "mood": "gay", "tokenize": False}
    theirs.bos_token = "<|im_start|>"
    assert ours.apply_chat_template(talk, **options) == theirs.apply_chat_template(talk, chat_template=WILD, **options)
    with pytest.raises(BadRequest, match="no bad"):
        ours.apply_chat_template([{"role": "bad", "content": ""}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadRequest, match="unsafe"):
        FolderTokenizer(tmp_path).apply_chat_template(TALK)


def test_a_folder_without_tokenizer_or_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    with pytest.raises(BadRequest, match="no chat template"):
        FolderTokenizer(tmp_path).apply_chat_template(TALK)


def test_the_tokens_that_end_a_turn_are_read_off_the_template(theirs, tmp_path: Path) -> None:
    assert turn_end_tokens(OURS) == turn_end_tokens(theirs) == [258]
    # A base model that ends text with one token and turns with another has both.
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    config = (TINY / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config.replace('_token": "<|im_end|>"', '_token": "<|endoftext|>"'))
    assert turn_end_tokens(FolderTokenizer(tmp_path)) == [256, 258]


def test_a_reply_is_decoded_without_its_end_token() -> None:
    assert decode_chat(OURS, [*OURS.encode("Hello"), 258]) == Reply("Hello")
    assert decode_chat(OURS, OURS.encode("Hello STOP"), ["STOP"]) == Reply("Hello ")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ('{"a": 1}', '{"a": 1}', []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>', "", [ToolCall("f", {"x": [1]})]),
        (
            'So.<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": "{}"}',
            "So.",
            [ToolCall("f", {}), ToolCall("g", {})],
        ),
        ('{"name": "f", "parameters": {"x": 1}}', "", [ToolCall("f", {"x": 1})]),
        ('ok [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "ok", [ToolCall("f", {})]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("[TOOL_CALLS] nonsense", "[TOOL_CALLS] nonsense", []),
        ('[TOOL_CALLS] [{"name": 3, "arguments": {}}]', '[TOOL_CALLS] [{"name": 3, "arguments": {}}]', []),
    ],
)
def test_tool_calls_are_found_and_broken_ones_stay_text(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == Reply(content, calls)


@given(st.text(alphabet="abSTOP é∑😀", max_size=30), st.lists(st.integers(1, 5), max_size=10))
def test_pieces_join_to_the_text_before_the_stop_and_nothing_is_taken_back(text: str, sizes: list[int]) -> None:
    stops = ["STOP", "ba"]
    tokens = OURS.encode(text)
    stream, said = TextStream(OURS, stops), ""
    while tokens:
        size = sizes.pop() if sizes else 1
        piece, tokens = tokens[:size], tokens[size:]
        said += stream.push(piece)
        assert text.startswith(said)
    assert said + stream.finish() == cut_at_stop(text, stops)
