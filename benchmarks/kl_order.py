"""Does a larger KL coefficient hold the policy closer to its reference? `mint/tiny`, trained by `mint.rl.train`.

    python benchmarks/kl_order.py

The task is chat, and the reward one that can be chased without end and at the cost of sense: the share of the letter e
in the answer. Training with kl_penalty_coef 0, 0.01, 0.05 and 0.1, everything else equal, shows what the penalty holds
back. Measured is the KL to the base model (mean log-prob difference of the sampled tokens) over the last five steps.

(With a reward of 0 or 1 for right and wrong answers these coefficients make no difference beyond noise, and in theory
too they should make little: the best policy weighs an answer by exp(reward / coefficient), and exp(10) is enough.)

The tutorial's starting recipe, learning rate 1e-5, groups of 4 and coefficient 0.05, runs once on additions as it
stands: a model this small hardly moves at that rate, but the KL term is active.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from rich.progress import track

import mint
from demos import ROOT, machine, table
from mint.client.tokenizers import load_tokenizer
from mint.rl.datasets import ListRLDataset
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import ChatRenderer, Renderer
from mint.rl.train import Config, KLReferenceConfig, train
from mint.rl.types import RLDataset, RLDatasetBuilder

sys.path.insert(0, str(ROOT / "recipes"))
from math_rl import AdditionDatasetBuilder

RESULTS = ROOT / "benchmarks" / "results" / "kl_order.json"
COEFFICIENTS = (0.0, 0.01, 0.05, 0.1)
SEEDS = (0, 1, 2)
LAST = 5
THINGS = ("a fox", "a boat", "a garden", "a lemon", "a piano", "a rose", "a castle", "a whale", "an owl", "a tree")


class LetterEnv(ProblemEnv):
    """One request; its answer earns the share of the letter e in it."""

    def __init__(self, thing: str, renderer: Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.thing = thing

    def get_question(self) -> str:
        return f"Tell me about {self.thing}."

    def check_answer(self, sample_str: str) -> float:
        return sample_str.lower().count("e") / max(len(sample_str), 1)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "e"


@dataclass(frozen=True)
class LetterDatasetBuilder(RLDatasetBuilder):
    seed: int
    groups_per_batch: int = 8
    group_size: int = 8
    num_batches: int = 25

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        rng, renderer = random.Random(self.seed), ChatRenderer(load_tokenizer("mint/tiny"))
        things = [rng.choice(THINGS) for _ in range(self.groups_per_batch * self.num_batches)]
        builders = [ProblemGroupBuilder(partial(LetterEnv, thing, renderer), self.group_size) for thing in things]
        return ListRLDataset(builders, self.groups_per_batch, seed=None), None


def run(service: mint.ServiceClient, builder: Any, learning_rate: float, coef: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model_name="mint/tiny",
            recipe_name="kl_order",
            dataset_builder=builder,
            learning_rate=learning_rate,
            kl_penalty_coef=coef,
            kl_reference_config=KLReferenceConfig(base_model="mint/tiny"),  # at coefficient 0: measured only
            max_tokens=48,
            seed=builder.seed,
            eval_every=0,
            save_every=0,
            holdout=0.0,
            loggers=(),
            rollout_json_export=False,
            log_path=folder,
        )
        started = time.monotonic()
        lines = train(config, service).metrics()
    return {
        "learning_rate": learning_rate,
        "kl_penalty_coef": coef,
        "seed": builder.seed,
        "groups_per_batch": builder.groups_per_batch,
        "group_size": builder.group_size,
        "kl": [line["kl_policy_base"] for line in lines],
        "reward": [line["env/all/reward/total"] for line in lines],
        "seconds": round(time.monotonic() - started, 1),
    }


def at_the_end(result: dict[str, Any], what: str) -> float:
    return statistics.mean(result[what][-LAST:])


def main() -> None:
    service = mint.ServiceClient()
    planned = [(coef, seed) for seed in SEEDS for coef in COEFFICIENTS]
    results = [run(service, LetterDatasetBuilder(seed), 1e-3, coef) for coef, seed in track(planned, "training")]
    recipe = run(service, AdditionDatasetBuilder(groups_per_batch=8, group_size=4, num_batches=10), 1e-5, 0.05)

    rows, means = [], []
    for coef in COEFFICIENTS:
        runs = [r for r in results if r["kl_penalty_coef"] == coef]
        kl, reward = ([at_the_end(r, what) for r in runs] for what in ("kl", "reward"))
        means.append(statistics.mean(kl))
        numbers = [*kl, means[-1], statistics.mean(reward)]
        rows.append([f"{coef:g}", *(f"{number:.4f}" for number in numbers)])
    ordered = all(a > b for a, b in pairwise(means))
    print(table(["kl_penalty_coef", *(f"KL, seed {s}" for s in SEEDS), "KL, mean", "reward"], *rows))
    print(f"The mean KL falls as the coefficient rises: {ordered}.")
    first, last = recipe["kl"][0], recipe["kl"][-1]
    print(f"Starting recipe, as it stands: KL {first:.1e} at first, {last:.1e} after {len(recipe['kl'])} steps.")
    stored = {"machine": machine(), "ordered": ordered, "results": results, "starting_recipe": recipe}
    RESULTS.write_text(json.dumps(stored) + "\n")
    print(json.dumps({"ordered": ordered, "kl": dict(zip(map(str, COEFFICIENTS), means, strict=True))}))


if __name__ == "__main__":
    main()
