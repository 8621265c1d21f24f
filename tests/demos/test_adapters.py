"""The four demos: right answers earn 1, wrong ones do not, the prompts are the documented ones, the scripts run."""

import random
import re
import runpy
from types import SimpleNamespace

import httpx
import pytest

from mint.client.tokenizers import load_tokenizer
from mint.recipes import functions
from mint.rl.sandbox import Case
from tests.rl.conftest import ROOT

TOKENIZER = load_tokenizer("mint/tiny")


def rewards_of(adapter: object, *pairs: tuple[str, object]) -> list[float]:
    """As the loop scores them."""
    from rl_core import score

    return score(adapter, [[SimpleNamespace(response=response, sample=sample) for response, sample in pairs]])[0]


# ------------------------------------------------------------------------------------------------ verifiable_math


def test_the_right_sum_and_nothing_else_earns_1() -> None:
    from verifiable_math import VerifiableMathAdapter

    adapter = VerifiableMathAdapter()
    problems = adapter.build_dataset()
    assert rewards_of(adapter, *((f" {a + b}", (a, b)) for a, b in problems)) == [1.0] * len(problems)
    assert rewards_of(adapter, *((f" {a + b + 1}", (a, b)) for a, b in problems)) == [0.0] * len(problems)
    assert rewards_of(adapter, (" 85\nQ: What is 1 + 1?", (47, 38)), ("", (1, 1)), (" 185", (47, 38))) == [
        1.0,
        0.0,
        0.0,
    ]


def test_the_prompt_asks_for_the_sum_that_is_graded() -> None:
    from verifiable_math import VerifiableMathAdapter

    prompt = VerifiableMathAdapter().make_prompt((47, 38), TOKENIZER)
    assert TOKENIZER.decode(prompt) == "Q: What is 4 + 5?\nA: 9\nQ: What is 47 + 38?\nA:"


# ------------------------------------------------------------------------------------------------ environment_tooluse


def test_right_code_earns_1_for_every_kind_of_function(monkeypatch) -> None:
    import environment_tooluse as demo

    problems = []
    for function in functions.FUNCTIONS:
        monkeypatch.setattr(functions, "FUNCTIONS", [function])
        problems.append(functions.draw_problem(random.Random(0)))
    adapter = demo.EnvironmentToolUseAdapter()
    assert rewards_of(adapter, *((p.answer, p) for p in problems)) == [1.0] * len(problems)


def test_wrong_and_harmful_code_earns_0() -> None:
    import environment_tooluse as demo

    name, tests = "g", (Case("g(2)", 4), Case("g(5)", 25))
    problem = demo.Problem("Q: Write a Python function g(x) that returns x squared.\nA:", "", tests)
    answers = {
        " def g(x): return x * x": 1.0,
        "```python\ndef g(x):\n    return x ** 2\n```\nDone.": 1.0,
        " def g(x): return x * x\nQ: Write something else.": 1.0,
        " def g(x): return x * 2": 0.0,  # right for one test only
        " def g(x): x * x": 0.0,
        " def g(x): import os; os._exit(0)": 0.0,
        " def g(x): open('/tmp/escaped', 'w').write('x'); raise SystemExit": 0.0,
        " I do not know.": 0.0,
        "": 0.0,
    }
    assert f"{name}(" in problem.question
    assert rewards_of(demo.EnvironmentToolUseAdapter(), *((a, problem) for a in answers)) == list(answers.values())


def test_the_code_prompt_is_statement_after_a_worked_example() -> None:
    import environment_tooluse as demo

    problem = demo.draw_problem(random.Random(0))
    text = TOKENIZER.decode(demo.EnvironmentToolUseAdapter().make_prompt(problem, TOKENIZER))
    assert text == demo.WORKED + problem.question
    assert re.fullmatch(r"(Q: Write a Python function .*\.\nA:) def .*\n(Q: Write a Python function .*\.\nA:)", text)


def test_without_isolation_the_demo_says_why_it_does_not_start(monkeypatch) -> None:
    import mint.rl.sandbox as sandbox

    def unavailable(*_: object, **__: object) -> None:
        raise sandbox.IsolationUnavailable("bubblewrap is not installed")

    monkeypatch.setattr(sandbox, "Sandbox", unavailable)
    with pytest.raises(SystemExit, match=r"only where that is safe\. bubblewrap is not installed"):
        run_script("environment_tooluse")


# ------------------------------------------------------------------------------------------------ preference_chat


def test_the_judge_ranks_answers_as_its_rubric_says() -> None:
    from preference_chat import PreferenceChatAdapter

    asked = "Describe a shy fox in one sentence."
    answers = [
        "Gladly! A shy fox is a clever animal.",
        "A shy fox is a clever animal.",
        "A shy fox is a clever animal. I mean, a shy fox is a clever animal. So, yes, a shy fox is a clever animal.",
        "Gladly! A red boat is useful and rare.",
        "No.",
        "Gladly! fox",
        "",
    ]
    assert rewards_of(PreferenceChatAdapter(), *((answer, asked) for answer in answers)) == [
        1.0, 0.75, 0.5, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip


def test_a_good_answer_earns_1_whatever_is_asked() -> None:
    from preference_chat import PreferenceChatAdapter

    adapter = PreferenceChatAdapter()
    pairs = []
    for asked in adapter.build_dataset():
        topic = re.search(r"an? \w+ \w+", asked.replace(" in one sentence", ""))
        assert topic is not None
        pairs.append((f"Of course! {topic[0].capitalize()} can be very nice.", asked))
    assert rewards_of(adapter, *pairs) == [1.0] * len(pairs)


def test_the_chat_prompt_is_the_templates_ready_for_the_assistant() -> None:
    from preference_chat import PreferenceChatAdapter

    prompt = PreferenceChatAdapter().make_prompt("Hello!", TOKENIZER)
    assert TOKENIZER.decode(prompt) == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_a_language_model_judges_where_one_is_named(monkeypatch) -> None:
    import preference_chat as demo

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://judge/v1/chat/completions" and b"shy fox" in request.content
        return httpx.Response(200, json={"choices": [{"message": {"content": "Fine. Score: 7"}}]})

    assert demo.choose_judge() is demo.local_judge
    monkeypatch.setenv("MINT_JUDGE_MODEL", "some-judge")
    with pytest.raises(SystemExit, match="set MINT_JUDGE_URL"):
        demo.choose_judge()
    monkeypatch.setenv("MINT_JUDGE_URL", "http://judge/v1")
    judge = demo.choose_judge()
    judge.judge.transport = httpx.MockTransport(answer)
    assert rewards_of(demo.PreferenceChatAdapter(judge), ("A shy fox.", "Tell me about a shy fox.")) == [0.7]


# ------------------------------------------------------------------------------------------------ agentic


def test_an_episode_of_tool_calls_is_the_conversation_the_template_renders() -> None:
    from agentic import CalculatorAdapter
    from rl_core import Episode, play_turn

    adapter, asked = CalculatorAdapter(), "312 * 47"
    episode = Episode(asked, adapter.make_prompt(asked, TOKENIZER))
    turns = ["<tool_call>312*47</tool_call>", "The answer is 14664."]
    for turn in turns:
        tokens = [*TOKENIZER.encode(turn), TOKENIZER.eos_token_id]
        play_turn(adapter, episode, SimpleNamespace(tokens=tokens, logprobs=[-1.0] * len(tokens)), TOKENIZER)
    conversation = [
        {"role": "user", "content": "What is 312 * 47?"},
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "14664"},
        {"role": "assistant", "content": turns[1]},
    ]
    assert episode.done
    assert TOKENIZER.decode(episode.tokens) + "\n" == TOKENIZER.apply_chat_template(conversation, tokenize=False)
    written = [t for t, weight in zip(episode.tokens[1:], episode.weights, strict=True) if weight]
    assert TOKENIZER.decode(written) == "<|im_end|>".join([*turns, ""])
    assert rewards_of(adapter, (episode.response, asked)) == [1.0]


def test_the_answer_counts_and_not_what_was_written_to_the_tool() -> None:
    from agentic import CalculatorAdapter

    adapter = CalculatorAdapter()
    problems = adapter.build_dataset()
    gold = [(f"<tool_call>{p}</tool_call>The answer is {eval(p)}.", p) for p in problems]
    assert rewards_of(adapter, *gold) == [1.0] * len(problems)
    wrong = ["The answer is 14665.", "<tool_call>14664</tool_call>", "<tool_call>14664", ""]
    assert rewards_of(adapter, *((w, "312 * 47") for w in wrong)) == [0.0] * len(wrong)
    assert rewards_of(adapter, ("The answer is 14,664.", "312 * 47"), ("-688", "312 - 1000")) == [1.0, 1.0]


@pytest.mark.parametrize(
    "written", ["The answer is 7.", "<tool_call>7**9**9</tool_call>", "<tool_call>1/0</tool_call>"]
)
def test_what_is_no_call_or_has_no_answer_ends_the_episode(written: str) -> None:
    from agentic import CalculatorAdapter

    adapter = CalculatorAdapter()
    adapter.make_prompt("1 + 1", TOKENIZER)
    assert adapter.next_turn(written, "1 + 1") is None


def test_a_call_in_the_json_form_of_larger_models_is_answered_too() -> None:
    from agentic import CalculatorAdapter

    adapter = CalculatorAdapter()
    adapter.make_prompt("6 * 7", TOKENIZER)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    reply = "\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert adapter.next_turn(call, "6 * 7") == reply


# ------------------------------------------------------------------------------------------------ the scripts


def run_script(name: str) -> None:
    runpy.run_path(str(ROOT / "demos" / "rl" / "adapters" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["verifiable_math", "preference_chat", "environment_tooluse", "agentic"])
def test_the_script_trains_and_prints_one_line_a_step(served, monkeypatch, capsys, name: str) -> None:
    for setting, value in {"STEPS": 2, "BATCH": 2, "GROUP": 4, "MAX_TOKENS": 40}.items():
        monkeypatch.setenv(f"MINT_RL_{setting}", str(value))
    run_script(name)
    lines = capsys.readouterr().out.splitlines()
    measured = r"avg_reward=\d\.\d{3}" if name == "preference_chat" else r"accuracy=\d+\.\d%"
    assert all(re.fullmatch(rf"Step {n}: {measured}, datums=\d+", line) for n, line in enumerate(lines[1:3], 1))
    assert lines[3].startswith("Saved: tinker://") and len(lines) == 4


def test_the_readme_shows_each_demos_settings_and_an_adapter_that_runs(served, monkeypatch, capsys) -> None:
    readme = (ROOT / "demos" / "rl" / "README.md").read_text()
    defaults = {}
    for column, name in enumerate(["verifiable_math", "preference_chat", "environment_tooluse", "agentic"]):
        source = (ROOT / "demos" / "rl" / "adapters" / f"{name}.py").read_text()
        (given,) = re.findall(r"RLConfig\.from_env\((.*?)\)", source)
        for setting, value in re.findall(r"(\w+)=([\w.-]+)", given):
            defaults.setdefault(setting, {})[column] = value
    for setting, values in defaults.items():
        row = re.search(rf"^\| `MINT_RL_{setting.upper()}`.*$", readme, re.MULTILINE)
        assert row is not None
        cells = [cell.strip() for cell in row[0].strip("|").split("|")]
        assert cells[2:] == [values.get(column, "") for column in range(4)]

    monkeypatch.setenv("MINT_RL_STEPS", "1")
    (adapter,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(adapter, "README.md", "exec"), {"__name__": "readme"})
    assert "Step 1: accuracy=" in capsys.readouterr().out
