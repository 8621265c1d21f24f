"""`demos/rl/rl_core.py`: what a step trains on, which adapters it takes, and that a seed repeats a run."""

import asyncio
import random
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import mint
from mint import types
from mint.client.tokenizers import load_tokenizer
from tests.rl.conftest import ROOT

TOKENIZER = load_tokenizer("mint/tiny")
STEP = re.compile(r"^Step (\d+): accuracy=(\d+\.\d)%, datums=(\d+)$", re.MULTILINE)


class Sums:
    """An adapter that knows nothing of `RLAdapter`."""

    def build_dataset(self) -> list[tuple[int, int]]:
        return [(random.randint(0, 9), random.randint(0, 9)) for _ in range(8)]

    def make_prompt(self, sample: tuple[int, int], tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {sample[0]} + {sample[1]}?\nA:")

    def compute_reward(self, response: str, sample: tuple[int, int]) -> float:
        return float(response.strip() == str(sum(sample)))


class ScriptedSampler:
    """Answers every request with the next of its lines, ended or cut off."""

    def __init__(self, *lines: str, ended: bool = True) -> None:
        self.lines = list(lines)
        self.ended = ended
        self.asked: list[tuple[list[int], int]] = []

    def sample(self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams) -> Any:
        self.asked.append((prompt.to_ints(), num_samples))
        end = [TOKENIZER.eos_token_id] if self.ended else []
        answers = [[*TOKENIZER.encode(self.lines.pop(0)), *end] for _ in range(num_samples)]
        sequences = [
            types.SampledSequence(tokens=tokens, logprobs=[-0.5] * len(tokens), stop_reason="stop")
            for tokens in answers
        ]
        return type("Answered", (), {"result": lambda self: types.SampleResponse(sequences)})()


def small(**given: Any) -> Any:
    from rl_core import RLConfig

    return RLConfig(**({"steps": 2, "batch": 2, "group": 4, "max_tokens": 6} | given))


# ------------------------------------------------------------------------------------------------ what is trained on


def test_a_datum_is_the_one_the_documents_build_by_hand() -> None:
    from rl_core import Episode, group_datums

    prompt, answers = TOKENIZER.encode("Q: What is 3 + 5?\nA:"), [[32, 56, 258], [32, 57, 258]]
    logprobs = [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0]]
    group = [Episode(None, list(prompt)) for _ in answers]
    for episode, tokens, old in zip(group, answers, logprobs, strict=True):
        episode.extend(tokens, old)

    for made, tokens, lp, adv in zip(group_datums(group, [1.0, 0.0]), answers, logprobs, [0.5, -0.5], strict=True):
        full, prefix = prompt + tokens, len(prompt) - 1
        by_hand = types.Datum(
            model_input=types.ModelInput.from_ints(tokens=full[:-1]),
            loss_fn_inputs={
                "target_tokens": full[1:],
                "weights": [0.0] * prefix + [1.0] * len(tokens),
                "logprobs": [0.0] * prefix + lp,
                "advantages": [0.0] * prefix + [adv] * len(tokens),
            },
        )
        assert made == by_hand


@pytest.mark.parametrize("reward", [0.0, 0.7, 1.0])
def test_a_group_of_equal_rewards_gives_no_datum(reward: float) -> None:
    from rl_core import Episode, group_datums

    group = [Episode(None, [1, 2]) for _ in range(3)]
    for episode in group:
        episode.extend([3], [-1.0])
    assert group_datums(group, [reward] * 3) == []


def test_an_empty_answer_gives_no_datum_but_counts_in_the_mean() -> None:
    from rl_core import Episode, group_datums

    group = [Episode(None, [1, 2]) for _ in range(4)]
    for episode in group[1:]:
        episode.extend([3], [-1.0])
    datums = group_datums(group, [0.0, 1.0, 1.0, 0.0])
    assert [d.loss_fn_inputs["advantages"].tolist() for d in datums] == [[0.0, 0.5], [0.0, 0.5], [0.0, -0.5]]


def test_a_run_without_signal_moves_no_weights(served, capsys) -> None:
    from rl_core import run_grpo

    class Constant(Sums):
        def compute_reward(self, response: str, sample: Any) -> float:
            return 0.5

    path = run_grpo(Constant(), small(lr=0.1))
    assert [m[2] for m in STEP.findall(capsys.readouterr().out)] == ["0", "0"]
    service = mint.ServiceClient()
    probe = types.ModelInput.from_ints(TOKENIZER.encode("Q: What is 3 + 5?\nA: 8"))
    trained = service.create_sampling_client(model_path=path).compute_logprobs(probe).result()
    assert trained == pytest.approx(
        service.create_sampling_client(base_model="mint/tiny").compute_logprobs(probe).result(), abs=1e-6
    )


# ------------------------------------------------------------------------------------------------ turns and rewards


def test_a_group_is_asked_for_once_and_the_environment_is_never_trained_on() -> None:
    from rl_core import RLAdapter, rollout

    class Echo(RLAdapter):
        def build_dataset(self) -> list[str]:
            return ["q"]

        def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
            return tokenizer.encode(sample)

        def compute_reward(self, response: str, sample: str) -> float:
            return 0.0

        def next_turn(self, response: str, sample: str) -> str | None:
            return "?" if response == "go" else None

    sampler = ScriptedSampler("go", "no", "end")
    (group,) = rollout(Echo(), ["q"], sampler, TOKENIZER, small(group=2))
    assert [count for _, count in sampler.asked] == [2, 1]
    assert [episode.response for episode in group] == ["goend", "no"]
    assert TOKENIZER.decode(group[0].tokens) == "qgo<|im_end|>?end<|im_end|>"
    assert group[0].weights == [1.0] * 3 + [0.0] + [1.0] * 4
    assert group[0].logprobs == [-0.5] * 3 + [0.0] + [-0.5] * 4

    endless = ScriptedSampler(*["go"] * 8)
    (group,) = rollout(Echo(), ["q"], endless, TOKENIZER, small(group=2, max_turns=3))
    assert [count for _, count in endless.asked] == [2, 1, 1, 1, 1]

    cut_off = ScriptedSampler("go", "go", ended=False)
    (group,) = rollout(Echo(), ["q"], cut_off, TOKENIZER, small(group=2))
    assert len(cut_off.asked) == 1 and all(episode.done for episode in group)


def test_asynchronous_rewards_of_a_group_are_worked_out_together() -> None:
    from rl_core import Episode, score

    class Meeting(Sums):
        barrier: asyncio.Barrier | None = None

        async def compute_reward(self, response: str, sample: Any) -> float:
            self.barrier = self.barrier or asyncio.Barrier(3)
            await self.barrier.wait()  # nobody passes before all three are here
            return sample

    groups = [[Episode(sample, [1]) for sample in (1.0, 2.0, 3.0)]]
    assert score(Meeting(), groups) == [[1.0, 2.0, 3.0]]

    async def in_a_notebook() -> list[list[float]]:
        return score(Meeting(), groups)

    assert asyncio.run(in_a_notebook()) == [[1.0, 2.0, 3.0]]


# ------------------------------------------------------------------------------------------------ adapters


def test_a_class_that_only_looks_like_an_adapter_is_one(served, capsys) -> None:
    from rl_core import run_grpo

    path = run_grpo(Sums(), small())
    printed = capsys.readouterr().out
    assert [m[0] for m in STEP.findall(printed)] == ["1", "2"]
    assert printed.startswith("Model: mint/tiny, Vocab: 256, RLConfig(model='mint/tiny', rank=16, steps=2, batch=2")
    assert path.startswith("tinker://") and printed.endswith(f"Saved: {path}\n")


def test_a_missing_method_is_refused_by_name() -> None:
    from rl_core import RLAdapter, run_grpo

    class Half:
        def build_dataset(self) -> list[int]:
            return []

    class HalfOfOurs(RLAdapter):
        def build_dataset(self) -> list[int]:
            return []

        def make_prompt(self, sample: int, tokenizer: Any) -> list[int]:
            return []

    with pytest.raises(TypeError, match="Half lacks make_prompt, compute_reward; see RLAdapter"):
        run_grpo(Half(), small())
    with pytest.raises(TypeError, match=r"HalfOfOurs.* abstract method '?compute_reward"):
        HalfOfOurs()


ELSEWHERE = '''
"""An adapter written for MinT elsewhere: the published import style, three methods, its own report."""
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo  # noqa: E402

class LengthAdapter(RLAdapter):
    def build_dataset(self):
        return [random.choice(["Why is the sky blue?", "Hello!"]) for _ in range(50)]

    def make_prompt(self, sample, tokenizer):
        messages = [{"role": "user", "content": sample}]
        return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True))

    def compute_reward(self, response, sample):
        return min(len(response.split()) / 10, 1.0)

    def evaluate(self, step, rewards, num_datums):
        print(f"Step {step}: avg_reward={sum(rewards) / len(rewards):.3f}, datums={num_datums}")

if __name__ == "__main__":
    cfg = RLConfig.from_env()
    cfg.steps = int(os.environ.get("MINT_RL_STEPS", "2"))
    cfg.batch = int(os.environ.get("MINT_RL_BATCH", "2"))
    cfg.max_tokens = int(os.environ.get("MINT_RL_MAX_TOKENS", "24"))
    run_grpo(LengthAdapter(), cfg)
'''


def test_an_adapter_in_the_published_style_runs_unmodified(served, tmp_path: Path, capsys) -> None:
    file = tmp_path / "demos" / "rl" / "adapters" / "length.py"
    file.parent.mkdir(parents=True)
    file.write_text(ELSEWHERE)
    (tmp_path / "demos" / "rl" / "rl_core.py").write_text((ROOT / "demos" / "rl" / "rl_core.py").read_text())
    runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.findall(r"^Step (\d): avg_reward=0\.\d{3}, datums=\d+$", printed, re.MULTILINE) == ["1", "2"]
    assert "Saved: tinker://" in printed


# ------------------------------------------------------------------------------------------------ settings


def test_a_seed_repeats_its_run_and_another_does_not(served, capsys) -> None:
    from rl_core import run_grpo

    def printed(seed: int) -> list[tuple[str, ...]]:
        run_grpo(Sums(), small(seed=seed, steps=3, lr=1e-3))
        return STEP.findall(capsys.readouterr().out)

    assert printed(1) == printed(1) != printed(2)


def test_every_field_has_a_variable_and_wins_over_the_demos_default(monkeypatch, tmp_path) -> None:
    from rl_core import RLConfig

    monkeypatch.chdir(tmp_path)
    names = {"model": "MINT_BASE_MODEL", "rank": "MINT_LORA_RANK"}
    given = {
        "model": "some/model", "rank": 3, "steps": 7, "batch": 5, "group": 9, "lr": 0.25, "max_tokens": 77,
        "temperature": 0.5, "max_turns": 2, "loss_fn": "ppo", "seed": 11,
    }  # fmt: skip
    assert given.keys() == {field.name for field in fields(RLConfig)}
    for name, value in given.items():
        with monkeypatch.context() as patch:
            patch.setenv(names.get(name, f"MINT_RL_{name.upper()}"), str(value))
            assert getattr(RLConfig.from_env(**{name: getattr(RLConfig, name)}), name) == value
    assert RLConfig.from_env(steps=21).steps == 21


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group is 1: an answer is compared with the others"):
        small(group=1)


def test_a_variable_that_cannot_be_read_is_named(monkeypatch, tmp_path) -> None:
    from rl_core import RLConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINT_RL_GROUP", "four")
    with pytest.raises(ValueError, match="MINT_RL_GROUP is 'four'; it must be of type int"):
        RLConfig.from_env()


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_reward_that_is_no_number_is_laid_to_the_adapter(reward: float | None) -> None:
    from rl_core import Episode, score

    class Nothing:
        def compute_reward(self, response: str, sample: object) -> float | None:
            return reward

    with pytest.raises(ValueError, match=r"Nothing\.compute_reward gave (None|nan); a reward is a finite number"):
        score(Nothing(), [[Episode(None, [1, 2])]])


def test_a_task_without_samples_is_refused(served) -> None:
    from rl_core import RLConfig, run_grpo

    class Empty:
        build_dataset = staticmethod(list)
        make_prompt = compute_reward = print

    with pytest.raises(ValueError, match=r"Empty\.build_dataset gave nothing to train on in step 1"):
        run_grpo(Empty(), RLConfig(steps=1))
