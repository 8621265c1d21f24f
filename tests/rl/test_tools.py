import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mint.chat import ToolCall
from mint.errors import BadRequest
from mint.rl.calculator import calculator, evaluate
from mint.rl.completers import MessageCompleter
from mint.rl.envs import MessageStepResult, ParseError
from mint.rl.rewards import Reward, Term, tool_spam_penalty
from mint.rl.tools import ToolMessageEnv, ToolResult, parse_tool_calls, sample_with_trace, tool
from mint.rl.types import Message, StopReason


@tool
def look_up(word: str, limit: int = 3) -> str:
    """Finds a word."""
    return f"{word} x{limit}"


@tool
async def submit(answer: str) -> ToolResult:
    """Hands in the answer."""
    return ToolResult("thank you", should_stop=True, metrics={"submitted": 1.0})


# ------------------------------------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        ("1 + 2 * (3 - 5)", "-3"),
        ("-4 ** 2", "-16"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 + 7 % 2", "4"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1e3", "1000"),
    ],
)
def test_the_calculator_calculates(expression: str, result: str) -> None:
    assert asyncio.run(calculator.run({"expression": expression})) == ToolResult(result)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "open('x')", "a + 1", "1 if 1 else 2", "'a' * 9", "True + 1",
        "9**9**9**9", "2 ** 5000", "10 ** (10 ** 6)", "(" * 300, "1 / 0", "", "1 +", "1;2", "(-8) ** 0.5", "[1]*10**9",
        "((((2**1000)*(2**1000))*(2**1000))*(2**1000))*(2**1000)", "1e308 * 10 ** 400",
    ],
)  # fmt: skip
def test_nothing_but_bounded_arithmetic_happens(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError)):
        evaluate(expression)
    result = asyncio.run(calculator.run({"expression": expression}))
    assert result.content.startswith("error: ")
    assert result.metrics == {"tool_errors": 1.0}


# ------------------------------------------------------------------------------------------------------- definitions


def test_a_function_becomes_a_tool_with_a_schema() -> None:
    assert look_up.spec() == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word"],
            },
        },
    }
    assert asyncio.run(look_up.run({"word": "a"})).content == "a x3"
    assert "unexpected keyword" in asyncio.run(look_up.run({"wrod": "a"})).content


def test_an_argument_without_a_json_type_is_refused() -> None:
    def odd(thing: object) -> str:
        return ""

    with pytest.raises(BadRequest, match="argument 'thing' of the tool 'odd'"):
        tool(odd)


# ------------------------------------------------------------------------------------------------------- calls

CALCULATOR, BOTH = {"calculator": calculator}, {"calculator": calculator, "look_up": look_up}


def call(text: str, tools: dict[str, Any] = CALCULATOR) -> list[ToolCall]:
    return parse_tool_calls({"role": "assistant", "content": text}, tools)


def test_calls_are_read_from_text() -> None:
    json_call = '<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>'
    assert call(f"Well. {json_call}", BOTH) == [ToolCall("look_up", {"word": "a"})]
    assert call("<tool_call>12*7</tool_call>") == [ToolCall("calculator", {"expression": "12*7"})]
    assert call("<tool_call>1</tool_call> <tool_call> 2 </tool_call>") == [
        ToolCall("calculator", {"expression": "1"}),
        ToolCall("calculator", {"expression": "2"}),
    ]
    assert call("no call at all") == []


def test_calls_that_come_parsed_are_taken_as_they_are() -> None:
    given = {"function": {"name": "look_up", "arguments": '{"word": "b"}'}}
    message: Message = {"role": "assistant", "content": None, "tool_calls": [given, ToolCall("x", {})]}
    assert parse_tool_calls(message, BOTH) == [ToolCall("look_up", {"word": "b"}), ToolCall("x", {})]
    with pytest.raises(ParseError, match="is not a tool call"):
        parse_tool_calls({"role": "assistant", "tool_calls": [{"name": "look_up"}]}, BOTH)


@pytest.mark.parametrize(
    "text", ["<tool_call>12*7", '<tool_call>{"nam": 1}</tool_call>', "<tool_call>{oops</tool_call>"]
)
def test_what_was_meant_as_a_call_and_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ParseError):
        call(text)


def test_a_bare_argument_needs_a_single_tool() -> None:
    with pytest.raises(ParseError):
        call("<tool_call>12*7</tool_call>", BOTH)


# ------------------------------------------------------------------------------------------------------- conversation

ASK: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "12*7?"}]


def said(env: ToolMessageEnv, *texts: str) -> list[MessageStepResult]:
    return [asyncio.run(env.step({"role": "assistant", "content": text})) for text in texts]


def right(prompt: str, answer: str, trace: Any) -> float:
    assert prompt == "12*7?"
    return float(answer == "84" and trace["sample"] == {"id": 1})


def test_tools_answer_and_the_last_message_is_graded() -> None:
    env = ToolMessageEnv(ASK, right, [calculator], sample={"id": 1})
    first, last = said(env, "<tool_call>12*7</tool_call>", "84")
    assert (first.episode_done, first.metrics) == (False, {"tool_calls": 1, "tool_errors": 0})
    assert first.next_messages[-1] == {"role": "tool", "name": "calculator", "content": "84"}
    assert (last.reward, last.episode_done, last.stop_reason) == (1.0, True, StopReason.COMPLETED)
    assert last.metrics == {"episode/tool_calls": 1, "episode/turns": 2, "reward/score": 1.0}
    assert env.trace["tool_calls"] == [{"name": "calculator", "arguments": {"expression": "12*7"}, "result": "84"}]


def test_process_metrics_can_be_reward_terms() -> None:
    reward = Reward((Term("right", right), tool_spam_penalty(1, 3, 0.1)))
    env = ToolMessageEnv(ASK, reward, [calculator], sample={"id": 1})
    *_, last = said(env, "<tool_call>1</tool_call>", "<tool_call>2</tool_call>", "84")
    assert last.reward == pytest.approx(1.0 - 0.1 * 0.5)
    assert last.metrics["reward/tool_spam"] == -0.5


def test_tool_mistakes_are_answers_to_learn_from() -> None:
    env = ToolMessageEnv(ASK, lambda r: 0.0, [calculator, look_up])
    (step,) = said(env, '<tool_call>{"name": "guess", "arguments": {}}</tool_call>')
    assert "no tool is called 'guess'; there are calculator, look_up" in step.next_messages[-1]["content"]
    assert step.metrics == {"tool_calls": 1, "tool_errors": 1.0}


def test_an_unreadable_message_leaves_the_conversation_as_it_was() -> None:
    env = ToolMessageEnv(ASK, lambda r: 0.0, [calculator])
    with pytest.raises(ParseError):
        said(env, "<tool_call>12*7")
    assert (env.messages, env.turns) == (ASK, 0)


def test_turns_and_calls_are_bounded_and_still_graded() -> None:
    env = ToolMessageEnv(ASK, lambda r: 0.5, [calculator], max_turns=2)
    *_, last = said(env, "<tool_call>1</tool_call>", "<tool_call>2</tool_call>")
    assert (last.stop_reason, last.reward) == (StopReason.MAX_TURNS, 0.5)
    env = ToolMessageEnv(ASK, lambda r: 0.5, [calculator], max_tool_calls=2)
    (last,) = said(env, "<tool_call>1</tool_call>" * 3)
    assert (last.stop_reason, len(env.tool_calls)) == (StopReason.MAX_TOOL_CALLS, 2)


def test_a_tool_can_end_the_episode() -> None:
    env = ToolMessageEnv(ASK, lambda r: 1.0, [submit])
    (last,) = said(env, "<tool_call>84</tool_call>")
    assert (last.episode_done, last.stop_reason, last.metrics["submitted"]) == (True, StopReason.TOOL_STOPPED, 1.0)


def test_without_tools_it_is_one_question_and_one_answer() -> None:
    env = ToolMessageEnv(ASK, lambda response: float(response == "<tool_call>"))
    (last,) = said(env, "<tool_call>")
    assert (last.episode_done, last.reward) == (True, 1.0)


class Script(MessageCompleter):
    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def __call__(self, messages: Sequence[Message]) -> Message:
        return {"role": "assistant", "content": self.texts.pop(0)}


def test_an_agent_can_be_run_for_its_answer_and_trace() -> None:
    policy = Script("<tool_call>12*7</tool_call>", "It is 84")
    answer, trace = asyncio.run(sample_with_trace("12*7?", policy, [calculator]))
    assert answer == "It is 84"
    assert sorted(trace) == ["messages", "tool_calls"]
    assert [m["role"] for m in trace["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trace["tool_calls"][0]["result"] == "84"
