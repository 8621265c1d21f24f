"""MinT in one file: teach a language model to add, first by example (SFT), then by reward (GRPO).

    make quickstart          or:  .venv/bin/python quickstart.py

No GPU, no key, no network: the bundled model `mint/tiny` learns on this machine, through a local server that starts and
stops by itself. Point MINT_BASE_URL at another server and set MINT_BASE_MODEL, and the same lines train a real model.
Every setting below is an environment variable too (MINT_RL_STEPS=40 ...), also from a `.env` file.

What to look at: the holdout accuracy, on additions the model is never trained on, before and after each stage.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import mint
from mint import types
from mint.config import load_dotenv

console = Console()
Problem = tuple[int, int]


@dataclass(frozen=True)
class Settings:
    base_model: str = "mint/tiny"
    lora_rank: int = 16
    seed: int = 0
    sft_steps: int = 10
    sft_lr: float = 1e-4
    sft_batch: int = 32
    rl_steps: int = 25
    rl_lr: float = 1e-3
    rl_batch: int = 16
    """Problems per step."""
    rl_group: int = 8
    """Answers per problem."""
    max_tokens: int = 8
    temperature: float = 0.8
    holdout: int = 200
    """Problems to measure on."""
    largest: int = 99
    """Numbers run from 0 to this."""
    shots: int = 0
    """Worked examples before the question, for models that have not met the format."""

    @classmethod
    def from_env(cls) -> Settings:
        """MINT_<FIELD> for every field; MINT_RL_MAX_TOKENS and MINT_RL_TEMPERATURE win over the plain names."""
        given = {}
        for field in fields(cls):
            names = (f"MINT_RL_{field.name.upper()}", f"MINT_{field.name.upper()}")
            for name in (name for name in reversed(names) if os.environ.get(name)):
                try:
                    given[field.name] = type(field.default)(os.environ[name])  # type: ignore[misc]
                except ValueError:
                    kind = type(field.default).__name__
                    raise SystemExit(f"{name} is {os.environ[name]!r}; it must be of type {kind}.") from None
        return cls(**given)


# ---------------------------------------------------------------------------------------------------- the task


def prompt_of(problem: Problem, shots: int) -> str:
    examples = "".join(f"Q: What is {n} + {n + 1}?\nA: {2 * n + 1}\n\n" for n in range(4, 4 + shots))
    return f"{examples}Q: What is {problem[0]} + {problem[1]}?\nA:"


def is_held_out(problem: Problem) -> bool:
    """A tenth of all additions: those `mint/tiny` has never seen, and this script never trains on."""
    low, high = sorted(problem)
    return zlib.crc32(f"{low} + {high}".encode()) % 10 == 0


def draw_problems(rng: random.Random, count: int, largest: int, held_out: bool) -> list[Problem]:
    drawn: list[Problem] = []
    while len(drawn) < count:
        problem = (rng.randint(0, largest), rng.randint(0, largest))
        if is_held_out(problem) == held_out:
            drawn.append(problem)
    return drawn


def extract_answer(text: str) -> int | None:
    found = re.search(r"-?\d[\d,]*", text)
    return int(found.group().replace(",", "")) if found else None


def reward_of(text: str, problem: Problem) -> float:
    return 1.0 if extract_answer(text) == sum(problem) else 0.0


# ------------------------------------------------------------------------------------------ sample, score, train


def answers_of(
    sampler: mint.SamplingClient, tokenizer, problems: list[Problem], settings: Settings, samples: int, seed: int
) -> list[tuple[list[int], list[types.SampledSequence]]]:
    """Prompt tokens and sampled answers for each problem; all requests run at once."""
    params = {"max_tokens": settings.max_tokens, "stop": "\n", "stop_token_ids": [tokenizer.eos_token_id]}
    prompts = [tokenizer.encode(prompt_of(problem, settings.shots)) for problem in problems]
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(tokens=prompt),
            num_samples=samples,
            sampling_params=types.SamplingParams(temperature=settings.temperature, seed=seed * 10_000 + n, **params),
        )
        for n, prompt in enumerate(prompts)
    ]
    return [(prompt, future.result().sequences) for prompt, future in zip(prompts, futures, strict=True)]


def holdout_accuracy(sampler: mint.SamplingClient, tokenizer, problems: list[Problem], settings: Settings) -> float:
    answers = answers_of(sampler, tokenizer, problems, settings, samples=1, seed=settings.seed)
    rewards = [reward_of(tokenizer.decode(s[0].tokens), p) for (_, s), p in zip(answers, problems, strict=True)]
    return sum(rewards) / len(rewards)


def sft_datum(problem: Problem, tokenizer, shots: int) -> types.Datum:
    prompt = tokenizer.encode(prompt_of(problem, shots))
    answer = [*tokenizer.encode(f" {sum(problem)}", add_special_tokens=False), tokenizer.eos_token_id]
    full = prompt + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=full[:-1]),
        loss_fn_inputs={"target_tokens": full[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer)},
    )


def rl_datums(prompt: list[int], sequences: list[types.SampledSequence], rewards: list[float]) -> list[types.Datum]:
    """One datum an answer, its advantage the reward less the group's mean; nothing where all rewards are equal."""
    mean = sum(rewards) / len(rewards)
    advantages = [reward - mean for reward in rewards]
    if not any(advantages):
        return []
    prefix = len(prompt) - 1
    datums = []
    for sequence, advantage in zip(sequences, advantages, strict=True):
        full, length = prompt + sequence.tokens, len(sequence.tokens)
        datums.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens=full[:-1]),
                loss_fn_inputs={
                    "target_tokens": full[1:],
                    "weights": [0.0] * prefix + [1.0] * length,
                    "logprobs": [0.0] * prefix + sequence.logprobs,
                    "advantages": [0.0] * prefix + [advantage] * length,
                },
            )
        )
    return datums


# --------------------------------------------------------------------------------------------------- the stages


class Run:
    """Settings, clients and the run directory of one quickstart."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.folder = Path("runs") / time.strftime(f"quickstart-%Y%m%d-%H%M%S-{os.getpid()}")
        self.folder.mkdir(parents=True)
        (self.folder / "config.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
        service = mint.ServiceClient()
        self.trainer = service.create_lora_training_client(
            base_model=settings.base_model, rank=settings.lora_rank, seed=settings.seed
        )
        self.tokenizer = self.trainer.get_tokenizer()
        self.holdout = self.draw(random.Random(1), settings.holdout, held_out=True)
        self.log_file = (self.folder / "metrics.jsonl").open("a", buffering=1)

    def log(self, **metrics: object) -> None:
        self.log_file.write(json.dumps(metrics) + "\n")

    def draw(self, rng: random.Random, count: int, held_out: bool = False) -> list[Problem]:
        return draw_problems(rng, count, self.settings.largest, held_out)

    def measure(self, sampler: mint.SamplingClient) -> float:
        return holdout_accuracy(sampler, self.tokenizer, self.holdout, self.settings)

    def sft(self) -> None:
        settings = self.settings
        for step in progress("SFT ", settings.sft_steps):
            problems = self.draw(self.rng, settings.sft_batch)
            data = [sft_datum(problem, self.tokenizer, settings.shots) for problem in problems]
            output = self.trainer.forward_backward(data, loss_fn="cross_entropy")
            self.trainer.optim_step(types.AdamParams(learning_rate=settings.sft_lr)).result()
            loss = output.result().metrics["loss:sum"] / sum(sum(d.loss_fn_inputs["weights"]) for d in data)
            self.log(stage="sft", step=step, loss=loss)

    def rl(self, sampler: mint.SamplingClient) -> list[float]:
        """Runs the GRPO stage from `sampler`'s weights on; holdout accuracy after every step."""
        settings, curve = self.settings, []
        for step in progress("GRPO", settings.rl_steps):
            problems = self.draw(self.rng, settings.rl_batch)
            seed = 1000 * (settings.seed + 1) + step
            groups = answers_of(sampler, self.tokenizer, problems, settings, settings.rl_group, seed)
            rewards, data = [], []
            for problem, (prompt, sequences) in zip(problems, groups, strict=True):
                scores = [reward_of(self.tokenizer.decode(s.tokens), problem) for s in sequences]
                rewards += scores
                data += rl_datums(prompt, sequences, scores)
            if data:
                self.trainer.forward_backward(data, loss_fn="importance_sampling")
                self.trainer.optim_step(types.AdamParams(learning_rate=settings.rl_lr)).result()
            sampler = self.trainer.save_weights_and_get_sampling_client()
            curve.append(self.measure(sampler))
            reward = sum(rewards) / len(rewards)
            self.log(stage="rl", step=step, reward=reward, datums=len(data), holdout_accuracy=curve[-1])
            console.print(f"Step {step}: accuracy={reward:.1%}, datums={len(data)}, holdout={curve[-1]:.1%}")
        return curve


def progress(label: str, steps: int) -> Iterable[int]:
    """Counts 1..steps with a bar and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=steps)
        for step in range(1, steps + 1):
            yield step
            bar.advance(task)


def plot(curve: list[float], height: int = 8) -> str:
    """The curve as a block chart, 0 % to 100 %."""
    eighths = " ▁▂▃▄▅▆▇█"
    rows = []
    for row in reversed(range(height)):
        cells = (eighths[round(8 * min(max(value * height - row, 0.0), 1.0))] * 2 for value in curve)
        rows.append(f"{(row + 1) / height:5.0%} │{''.join(cells)}")
    return "\n".join([*rows, "      └" + "──" * len(curve)])


def main() -> None:
    load_dotenv()
    settings = Settings.from_env()
    console.print(f"[bold]MinT quickstart[/] on {settings.base_model}: {asdict(settings)}", highlight=False)
    started = time.monotonic()
    run = Run(settings)
    base = run.measure(run.trainer.save_weights_and_get_sampling_client())
    run.log(stage="base", step=0, holdout_accuracy=base)
    console.print(f"Holdout accuracy of the base model: {base:.1%}")

    run.sft()
    sampler = run.trainer.save_weights_and_get_sampling_client()
    taught = run.measure(sampler)
    run.log(stage="sft", step=settings.sft_steps, holdout_accuracy=taught)
    console.print(f"Holdout accuracy after {settings.sft_steps} steps of SFT: {taught:.1%}")

    rl_started = time.monotonic()
    curve = [taught, *run.rl(sampler)]
    checkpoint = run.trainer.save_state("quickstart").result().path
    console.print(f"\nHoldout accuracy by step of GRPO\n{plot(curve)}")
    console.print(
        f"Holdout accuracy {base:.1%} → {taught:.1%} by SFT → [bold]{curve[-1]:.1%} by GRPO[/] "
        f"({time.monotonic() - rl_started:.0f} s of {time.monotonic() - started:.0f} s)"
    )
    console.print(f"Metrics: {run.folder}/metrics.jsonl   Checkpoint: {checkpoint}")


if __name__ == "__main__":
    main()
