"""What goes wrong with importance ratios when samples are drawn at a temperature other than 1.

    python benchmarks/temperature_ratios.py [--out benchmarks/results/temperature_ratios.json]

Four conventions, on mint/tiny, two-digit addition, GRPO with the ppo loss:

    raw / raw            the sampler records the policy's own log-prob, the trainer computes the same (this system)
    tempered / raw       the sampler records the log-prob after tempering, the trainer does not temper
    raw / tempered       the other way round
    tempered / tempered  both temper: the tempered policy is what is trained

First, at fixed weights: mean, spread and range of the ratio, which should be 1, and the share of tokens that ppo clips
although nothing has moved. Then a short training run of each, several seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mint.engine.engine import Engine
from mint.engine.model import BaseModel
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampledSequence, SampleRequest, SamplingParams

MODEL = "mint/tiny"
CONVENTIONS = {
    "raw / raw": (False, False),
    "tempered / raw": (True, False),
    "raw / tempered": (False, True),
    "tempered / tempered": (True, True),
}
TEMPERATURES = (0.5, 0.8, 1.2)
PROMPTS, GROUP, LENGTH = 12, 8, 6
RATE = 1e-3


@dataclass(frozen=True)
class Problem:
    prompt: list[int]
    answer: str


class Task:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def problems(self, rng: np.random.Generator, count: int) -> list[Problem]:
        pairs = rng.integers(10, 100, (count, 2)).tolist()
        return [Problem(self._tokenizer.encode(f"Q: What is {a} + {b}?\nA:"), str(a + b)) for a, b in pairs]

    def reward(self, problem: Problem, sequence: SampledSequence) -> float:
        return float(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip() == problem.answer)


def draw(
    engine: Engine, policy: str, problems: Sequence[Problem], temperature: float, seed: int, group: int = GROUP
) -> list[list[SampledSequence]]:
    params = [SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed + n) for n in range(len(problems))]
    asked = [
        engine.sample(policy, SampleRequest(ModelInput.from_ints(problem.prompt), chosen, group))
        for problem, chosen in zip(problems, params, strict=True)
    ]
    return [answer.result().sequences for answer in asked]


def datums(task: Task, problems: Sequence[Problem], groups: Sequence[Sequence[SampledSequence]]) -> list[Datum]:
    data = []
    for problem, group in zip(problems, groups, strict=True):
        rewards = [task.reward(problem, sequence) for sequence in group]
        for sequence, reward in zip(group, rewards, strict=True):
            full, before = problem.prompt + sequence.tokens, len(problem.prompt) - 1
            n = len(sequence.tokens)
            assert sequence.logprobs is not None
            inputs = {
                "target_tokens": full[1:],
                "weights": [0.0] * before + [1.0] * n,
                "logprobs": [0.0] * before + sequence.logprobs,
                "advantages": [0.0] * before + [reward - float(np.mean(rewards))] * n,
            }
            data.append(Datum(ModelInput.from_ints(full[:-1]), inputs))
    return data


def recorded(engine: Engine, data: list[Datum], tempered: bool, temperature: float) -> list[Datum]:
    """The data as a sampler of that convention would have recorded them."""
    if not tempered:
        return data
    outputs = engine.forward("a", data, "importance_sampling", {"temperature": temperature}).result().loss_fn_outputs
    changed = []
    for datum, output in zip(data, outputs, strict=True):
        logprobs = output["logprobs"].to_numpy() * datum.loss_fn_inputs["weights"].to_numpy()
        changed.append(Datum(datum.model_input, datum.loss_fn_inputs | {"logprobs": logprobs}))
    return changed


def fixed_weights(engine: Engine, task: Task, temperature: float, convention: str) -> dict[str, float]:
    sampler_tempers, trainer_tempers = CONVENTIONS[convention]
    engine.create_adapter("a", MODEL, LoraConfig(rank=16, seed=0)).result()
    engine.snapshot("a", "p").result()
    problems = task.problems(np.random.default_rng(0), 64)
    data = datums(task, problems, draw(engine, "p", problems, temperature, 0))
    data = recorded(engine, data, sampler_tempers, temperature)
    option = {"temperature": temperature} if trainer_tempers else {}
    output = engine.forward("a", data, "ppo", option).result()
    ratios = np.concatenate(
        [
            np.exp(o["logprobs"].to_numpy() - d.loss_fn_inputs["logprobs"].to_numpy())[
                d.loss_fn_inputs["weights"].to_numpy() != 0
            ]
            for o, d in zip(output.loss_fn_outputs, data, strict=True)
        ]
    )
    low, high = np.quantile(ratios, [0.01, 0.99])
    outside = float(((ratios < 0.8) | (ratios > 1.2)).mean())
    engine.release("a").result()
    return {"mean": float(ratios.mean()), "std": float(ratios.std()), "q01": float(low), "q99": float(high),
            "outside_clip": outside}  # fmt: skip


def learn(
    engine: Engine, task: Task, temperature: float, convention: str, seed: int, steps: int, rate: float
) -> list[float]:
    """Held-out accuracy, sampled at temperature 1, before the first step and after every second one."""
    sampler_tempers, trainer_tempers = CONVENTIONS[convention]
    option = {"temperature": temperature} if trainer_tempers else {}
    engine.create_adapter("a", MODEL, LoraConfig(rank=16, seed=seed)).result()
    rng = np.random.default_rng(seed)
    held_out = task.problems(np.random.default_rng(10**6), 64)
    curve = []
    for step in range(steps + 1):
        engine.snapshot("a", "p").result()
        if step % 2 == 0:
            answers = draw(engine, "p", held_out, 1.0, 7, 2)
            curve.append(float(np.mean([task.reward(p, s) for p, g in zip(held_out, answers, strict=True) for s in g])))
        if step == steps:
            break
        problems = task.problems(rng, PROMPTS)
        data = datums(task, problems, draw(engine, "p", problems, temperature, 1000 * step + seed))
        data = recorded(engine, data, sampler_tempers, temperature)
        # Two updates on the same data, so that the ratio has something to do.
        for _ in range(2):
            engine.forward_backward("a", data, "ppo", option).result()
            engine.optim_step("a", AdamParams(learning_rate=rate, beta2=0.95)).result()
    engine.release("a").result()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    engine = Engine([MODEL])
    task = Task(BaseModel.load(MODEL).tokenizer)
    rows = []
    for temperature in TEMPERATURES:
        for convention in CONVENTIONS:
            ratio = fixed_weights(engine, task, temperature, convention)
            curves = [
                learn(engine, task, temperature, convention, seed, args.steps, RATE) for seed in range(args.seeds)
            ]
            last = [curve[-1] for curve in curves]
            rows.append({"temperature": temperature, "convention": convention, "ratio": ratio, "curves": curves})
            print(
                f"T={temperature} {convention:>20}: ratio {ratio['mean']:.3f} +- {ratio['std']:.3f}, 1 % and 99 % "
                f"{ratio['q01']:.2f} {ratio['q99']:.2f}, outside the clip {ratio['outside_clip']:.0%}; accuracy "
                f"{np.mean([c[0] for c in curves]):.2f} -> {np.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})",
                flush=True,
            )
    engine.close()
    settings = {"model": MODEL, "loss_fn": "ppo", "learning_rate": RATE, "prompts": PROMPTS, "group": GROUP,
                "steps": args.steps, "seeds": args.seeds}  # fmt: skip
    result = {
        "hardware": platform.machine(),
        "seconds": time.perf_counter() - started,
        "settings": settings,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
