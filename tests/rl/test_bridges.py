"""Other people's tasks as our environments: gold answers earn 1, wrong ones 0, hostile ones do nothing."""

import asyncio
import gzip
import importlib.util
import json
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mint.errors import BadRequest
from mint.rl.bridges import MissingExtra, require
from mint.rl.bridges.formats import FORMATS, find_format
from mint.rl.bridges.gsm8k import Gsm8kDatasetBuilder, WordProblem, is_equal, load_problems
from mint.rl.bridges.reasoning_gym import EVALUATED, PARSED_BY_SYMPY, ReasoningGymDatasetBuilder, is_harmless
from mint.rl.bridges.verifiers import VerifiersDatasetBuilder
from mint.rl.datasets import dataset_problem_ids
from mint.rl.renderers import PlainRenderer
from mint.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult


class ByteTokenizer:
    """One token a byte, shifted by one; 0 ends a sequence."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token - 1 for token in tokens if token).decode()


TOKENIZER = ByteTokenizer()
RENDERER = PlainRenderer(TOKENIZER)  # type: ignore[arg-type]


def build(builder: RLDatasetBuilder) -> tuple[RLDataset, RLDataset | None]:
    return asyncio.run(builder())


def groups(dataset: RLDataset) -> list[EnvGroupBuilder]:
    return [group for i in range(len(dataset)) for group in dataset.get_batch(i)]


def first_env(group: EnvGroupBuilder) -> Any:
    return asyncio.run(group.make_envs())[0]


def prompt(env: Env) -> str:
    observation = asyncio.run(env.initial_observation())
    assert isinstance(observation, tuple)
    return TOKENIZER.decode(observation[0].to_ints())


def respond(env: Env, text: str) -> StepResult:
    return asyncio.run(env.step([*TOKENIZER.encode(text), 0]))


# --------------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize(
    ("name", "response", "answer"),
    [
        ("boxed", r"First \boxed{1}, no: \boxed{\frac{3}{2}}.", r"\frac{3}{2}"),
        ("boxed", r"so \boxed{\sqrt{\frac{a}{b}}}", r"\sqrt{\frac{a}{b}}"),
        ("boxed", r"not closed \boxed{72", None),
        ("boxed", "the answer is 72", None),
        ("hashes", "2 + 2 = 4\n#### 4\n", "4"),
        ("hashes", "the answer is 4", None),
        ("tags", "<answer>1</answer> then <answer>\na b\n</answer>", "a b"),
        ("tags", "<answer>1", None),
        ("qa", " 1,234 eggs", "1234"),
        ("qa", " no idea", None),
        ("completion", " a b \n", "a b"),
        ("completion", " ", None),
    ],
)
def test_a_format_finds_the_answer_where_it_asked_for_it(name: str, response: str, answer: str | None) -> None:
    assert FORMATS[name].extract(response) == answer


def test_questions_may_hold_braces_and_unknown_formats_are_refused() -> None:
    assert find_format("qa").prompt("What is {x} if f{0}?") == "Q: What is {x} if f{0}?\nA:"
    with pytest.raises(BadRequest, match="'xml' is none of boxed, hashes"):
        find_format("xml")


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'mint-rl\[envs\]'"):
        require("no_such_package.v1", "envs")


# --------------------------------------------------------------------------------------------------------------------
# Word problems

ROWS = [
    {"question": f"Ann has {n} eggs and buys 1,000. How many?", "answer": f"{n}+1000=<<{n}+1000>>\n#### 1,00{n}"}
    for n in range(1, 10)
]


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    return str(path)


def test_problems_are_read_from_every_layout(gsm8k_file: str, tmp_path: Path) -> None:
    assert load_problems(gsm8k_file)[0] == WordProblem("Ann has 1 eggs and buys 1,000. How many?", "1001")
    (tmp_path / "mawps.jsonl").write_text('{"input": "2 and 2?", "target": 4.0}\n')
    (tmp_path / "svamp.json").write_text('[{"Body": "A dvd is 76", "Question": "How much?", "Answer": -51.5}]')
    assert load_problems(tmp_path / "mawps.jsonl") == [WordProblem("2 and 2?", "4")]
    assert load_problems(tmp_path / "svamp.json") == [WordProblem("A dvd is 76. How much?", "-51.5")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"prompt": "2 and 2?"}', "row 0 has the fields .'prompt'.; expected question and answer"),
        ('{"question": "2 and 2?", "answer": "four"}', "'four', which is not a number"),
        ("", "holds no problems"),
    ],
)
def test_a_row_that_is_no_problem_is_refused(row: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(row)
    with pytest.raises(BadRequest, match=complaint):
        load_problems(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("72", "72", True),
        ("72.00", "72", True),
        ("$1,072", "1072", True),
        ("18 dollars", "18", True),
        ("50\\%", "50", True),
        ("7/2", "3.5", True),
        (r"\frac{7}{2}", "3.5", True),
        (r"18 \text{ eggs}", "18", True),
        ("3 + 5", "8", True),
        ("-5", "5", False),
        ("18 or 19", "18", False),
        ("18, 19", "18", False),
        ("1/0", "1", False),
        ("eighteen", "18", False),
        ("9^9^9^9", "1", False),
        (r"99999!!", "1", False),
        ("x" * 10_000, "1", False),
        ("", "0", False),
    ],
)
def test_numbers_are_equal_in_any_spelling(answer: str, gold: str, equal: bool) -> None:
    assert is_equal(answer, gold) is equal


def test_plain_numbers_are_graded_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "math_verify" else real(name))
    assert is_equal("1,072.0", "1072")
    assert not is_equal(r"\frac{7}{2}", "3.5")


def test_the_gold_answer_to_a_word_problem_earns_one(gsm8k_file: str) -> None:
    train, test = build(Gsm8kDatasetBuilder(gsm8k_file, RENDERER, group_size=3, groups_per_batch=2))
    assert test is not None
    for group in groups(train) + groups(test):
        env = first_env(group)
        assert prompt(env) == env.problem.question + "\n\nWrite your final answer in \\boxed{}."
        assert respond(env, rf"It is \boxed{{{env.get_reference_answer()}}}").reward == 1.0
        assert respond(env, r"It is \boxed{7}").reward == 0.0
        assert respond(env, f"It is {env.get_reference_answer()}").reward == pytest.approx(-0.1)
    assert len(asyncio.run(groups(train)[0].make_envs())) == 3
    assert groups(train)[0].logging_tags() == ["gsm8k"]


def test_the_holdout_shares_no_problem_with_the_training_set(gsm8k_file: str) -> None:
    train, test = build(Gsm8kDatasetBuilder(gsm8k_file, RENDERER, holdout=0.4))
    assert test is not None
    train_ids, test_ids = dataset_problem_ids(train), dataset_problem_ids(test)
    assert len(train_ids) + len(test_ids) == len(ROWS)
    assert not set(train_ids) & set(test_ids)
    again, _ = build(Gsm8kDatasetBuilder(gsm8k_file, RENDERER, holdout=0.4))
    assert dataset_problem_ids(again) == train_ids


def test_a_test_file_and_a_limit_are_honoured(gsm8k_file: str) -> None:
    train, test = build(Gsm8kDatasetBuilder(gsm8k_file, RENDERER, test_path=gsm8k_file, limit=4, num_batches=5))
    assert len(groups(train)) == 5 * 8
    assert len(set(dataset_problem_ids(train))) == 4
    assert test is not None
    assert len(groups(test)) == len(ROWS)


def test_groups_of_problems_survive_pickling(gsm8k_file: str) -> None:
    group = groups(build(Gsm8kDatasetBuilder(gsm8k_file, RENDERER))[0])[0]
    assert pickle.loads(pickle.dumps(group)).problem_id() == group.problem_id()


# --------------------------------------------------------------------------------------------------------------------
# reasoning-gym


def gym_envs(task: str, **settings: Any) -> list[Any]:
    train, test = build(ReasoningGymDatasetBuilder(task, RENDERER, size=6, **settings))
    assert test is not None
    return [first_env(group) for group in groups(train) + groups(test)]


@pytest.mark.parametrize(
    "task", ["chain_sum", "letter_counting", "spell_backward", *sorted(EVALUATED | PARSED_BY_SYMPY)]
)
def test_the_gold_answer_of_a_gym_task_earns_one_and_a_wrong_one_nothing(task: str) -> None:
    for env in gym_envs(task):
        assert "<answer>" in prompt(env)
        if "Integral" in env.get_reference_answer():
            continue  # SymPy could not do it either; the question as its own answer is not accepted here
        assert respond(env, f"Well. <answer>{env.get_reference_answer()}</answer>").reward == 1.0
        assert respond(env, "<answer>banana</answer>").reward == 0.0
        assert respond(env, env.get_reference_answer()).reward == pytest.approx(-0.1)


def test_crumbs_for_wrong_answers_are_swept_away_unless_asked_for() -> None:
    assert {respond(env, "<answer>1+1</answer>").reward for env in gym_envs("countdown")} == {0.0}
    assert {respond(env, "<answer>1+1</answer>").reward for env in gym_envs("countdown", threshold=0.0)} == {0.05}


def test_gym_problems_follow_their_seed_and_settings() -> None:
    def questions(**settings: Any) -> list[str]:
        train, _ = build(ReasoningGymDatasetBuilder("chain_sum", RENDERER, size=20, **settings))
        return [first_env(group).entry["question"] for group in groups(train)]

    assert questions(seed=1) == questions(seed=1) != questions(seed=2)
    long = questions(config={"min_terms": 9, "max_terms": 9})
    assert all(question.count("+") + question.count("- ") >= 8 for question in long)


def test_unknown_gym_tasks_and_settings_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"no task 'chain_sums'; it has .*chain_sum"):
        build(ReasoningGymDatasetBuilder("chain_sums", RENDERER))
    with pytest.raises(BadRequest, match=r"chain_sum refused the settings .*terms"):
        build(ReasoningGymDatasetBuilder("chain_sum", RENDERER, config={"terms": 9}))


@pytest.mark.parametrize("task", sorted(EVALUATED | PARSED_BY_SYMPY))
def test_an_answer_that_is_code_is_not_executed(task: str, tmp_path: Path) -> None:
    env = gym_envs(task)[0]
    for number, wrapping in enumerate(("{}", "[{}]", "1 + {}", "{}!", "(lambda: {})()", "sin({})")):
        path = tmp_path / str(number)
        code = wrapping.format(f"open('{path}', 'w')")
        env.dataset.score_answer(code, env.entry)
        executed = path.exists()
        path.unlink(missing_ok=True)
        assert respond(env, f"<answer>{code}</answer>").reward == 0.0
        assert not path.exists()
        assert executed or number, "the scorer itself is harmless by now: the guard may go"


@pytest.mark.parametrize(
    ("answer", "harmless"),
    [
        ("94*4 - 61 - 6", True),
        ("-34*x**8/15 - 5*x/4 + C", True),
        ("x**(3/2)", True),
        ("9**9**9", False),
        ("(9**99)**99", False),
        ("2**1000", False),
        ("1 << 10000", False),
        ("'a' * 9", False),
        ("x.real", False),
        ("exec", True),
        ("exec(x)", False),
        ("[x for x in y]", False),
    ],
)
def test_only_arithmetic_reaches_sympy(answer: str, harmless: bool) -> None:
    assert is_harmless(answer, "countdown") is harmless


# --------------------------------------------------------------------------------------------------------------------
# verifiers

TASKSET = """
    import verifiers.v1 as vf

    class Data(vf.TaskData):
        answer: str

    class Doubling(vf.Task[Data, vf.State, vf.TaskConfig]):
        @vf.reward(weight=2.0)
        async def exact(self, trace: vf.Trace) -> float:
            return float(trace.last_reply == self.data.answer)

        @vf.reward(weight=-0.5)
        async def cut_off(self, trace: vf.Trace) -> float:
            return float(trace.is_truncated)

        @vf.metric
        async def turns(self, trace: vf.Trace) -> float:
            return float(trace.num_turns + len(trace.messages))

    class DoublingTaskset(vf.Taskset[Doubling, vf.TasksetConfig]):
        def load(self):
            for n in range(10):
                data = Data(prompt=f"Twice {n}?", system_prompt="Be brief. ", answer=str(2 * n))
                yield Doubling(data, self.config.task)

    __all__ = ["DoublingTaskset"]
"""


@pytest.fixture
def doubling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A taskset installed as the package `doubling`."""
    pytest.importorskip("verifiers.v1", reason="needs mint-rl[verifiers], which holds back the openai package")
    (tmp_path / "doubling.py").write_text(textwrap.dedent(TASKSET))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("doubling")
    sys.modules.pop("doubling")


def test_a_taskset_by_name_is_played_and_scored_by_its_own_rewards(doubling: ModuleType) -> None:
    train, test = build(VerifiersDatasetBuilder("doubling", RENDERER, group_size=2, holdout=0.3))
    assert test is not None
    assert len(groups(train)) + len(groups(test)) == 10
    for group in groups(train):
        env = first_env(group)
        assert prompt(env) == f"Be brief. {env.task.data.prompt}"
        right = respond(env, f" {env.task.data.answer}\n")
        assert (right.reward, right.episode_done) == (2.0, True)
        assert right.metrics == {"reward/exact": 1.0, "reward/cut_off": 0.0, "turns": 4.0}
        assert respond(env, "7").reward == 0.0
        cut = asyncio.run(env.step(TOKENIZER.encode(env.task.data.answer), extra={"stop_reason": "length"}))
        assert cut.reward == 1.5
        assert pickle.loads(pickle.dumps(group)).problem_id() == group.problem_id()


def test_a_taskset_object_will_do_and_may_be_limited(doubling: ModuleType) -> None:
    import verifiers.v1 as vf

    taskset = doubling.DoublingTaskset(vf.TasksetConfig())
    train, test = build(VerifiersDatasetBuilder(taskset, RENDERER, limit=4))
    assert test is not None
    assert len(groups(train)) + len(groups(test)) == 4
    taskset.INFINITE = True
    with pytest.raises(BadRequest, match="has no end"):
        build(VerifiersDatasetBuilder(taskset, RENDERER))


def test_what_cannot_be_played_here_is_refused_by_name(doubling: ModuleType) -> None:
    import verifiers.v1 as vf

    async def needs_runtime(self: Any, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0

    async def set_up(self: Any, trace: vf.Trace, runtime: vf.Runtime) -> None: ...

    picture = vf.UserMessage(content=[vf.TextContentPart(text="What is this?")])
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"NEEDS_CONTAINER": True}, {}, "container"),
        ({"setup": set_up}, {}, r"setup\(\) prepares"),
        ({"run": vf.reward(needs_runtime)}, {}, "needs_runtime reads a runtime"),
        ({"toolsets": classmethod(lambda cls, config: ["server"])}, {}, "tool servers"),
        ({}, {"prompt": None}, "no prompt"),
        ({}, {"prompt": [picture]}, "more than text"),
    ]
    for members, data, reason in refused:
        task_class = type("Refused", (doubling.Doubling,), members)

        class Taskset(doubling.DoublingTaskset):  # type: ignore[name-defined, misc]
            def load(self, made: Any = task_class, data: Any = data) -> Iterator[Any]:
                yield made(doubling.Data(**{"prompt": "?", "answer": "", **data}))

        with pytest.raises(BadRequest, match=reason):
            build(VerifiersDatasetBuilder(Taskset(vf.TasksetConfig()), RENDERER))


def test_verifiers_is_asked_for_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingExtra, match=r"mint-rl\[verifiers\]"):
        build(VerifiersDatasetBuilder("doubling", RENDERER))
