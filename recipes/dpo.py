"""Direct preference optimisation: from pairs of a better and a worse answer, without a reward or a judge.

    python recipes/dpo.py                           # right and nearly right additions, on the bundled model
    python recipes/dpo.py data=pairs.jsonl base_model=Qwen/Qwen3-0.6B learning_rate=1e-4

`data` holds one {"prompt": ..., "chosen": ..., "rejected": ...} a line; the last tenth of it is kept for measuring. The
loss of a pair is -log sigmoid(beta * margin), its margin being how much more the policy prefers the chosen answer than
the reference does:

    margin = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))

The reference is the policy as it was at the start. arXiv 2305.18290.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import configured

import mint
from mint import types
from mint.recipes.addition import answer_of, draw_problems, prompt_of, wrong_answer_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Config:
    base_model: str = "mint/tiny"
    data: str = ""
    """A JSONL file; empty: additions."""
    log_path: str = "runs/dpo"
    steps: int = 20
    batch_size: int = 16
    """Pairs."""
    learning_rate: float = 5e-4
    """At the first step; it falls evenly to 0."""
    beta: float = 0.1
    """How dear a departure from the reference is."""
    lora_rank: int = 16
    eval_every: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str


def load_pairs(config: Config) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs."""
    if config.data:
        pairs = [Pair(**json.loads(line)) for line in Path(config.data).read_text().splitlines()]
        border = len(pairs) - max(1, len(pairs) // 10)
        return pairs[:border], pairs[border:]
    rng = random.Random(config.seed)
    train, held_out = draw_problems(rng, config.steps * config.batch_size), draw_problems(rng, 64, held_out=True)
    made = [[Pair(prompt_of(p), answer_of(p), wrong_answer_of(p, rng)) for p in some] for some in (train, held_out)]
    return made[0], made[1]


def to_datum(prompt: str, answer: str, tokenizer: Any) -> types.Datum:
    before = tokenizer.encode(prompt)
    after = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = before + after
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0] * (len(before) - 1) + [1.0] * len(after)},
    )


def answer_logprob(logprobs: torch.Tensor, datum: types.Datum) -> torch.Tensor:
    """The log-prob of the whole answer, the prompt being given."""
    return (logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()


class Preferences:
    """Pairs as datums, chosen and rejected in turn, with the reference's log-prob of every answer."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, reference: mint.SamplingClient) -> None:
        self.datums = [to_datum(p.prompt, answer, tokenizer) for p in pairs for answer in (p.chosen, p.rejected)]
        futures = [reference.compute_logprobs(_whole(datum)) for datum in self.datums]
        self.reference = [
            sum(w * (p or 0.0) for w, p in zip(datum.loss_fn_inputs["weights"], future.result()[1:], strict=True))
            for datum, future in zip(self.datums, futures, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.datums) // 2

    def loss(self, indices: Sequence[int], logprobs: Sequence[torch.Tensor], beta: float) -> Any:
        """(mean loss, metrics) of the pairs at `indices`, whose log-probs these are."""
        import torch
        from torch.nn.functional import logsigmoid

        gains = [
            answer_logprob(p, self.datums[n]) - self.reference[n]
            for p, n in zip(logprobs, self.rows(indices), strict=True)
        ]
        margins = torch.stack(gains[0::2]) - torch.stack(gains[1::2])
        loss = -logsigmoid(beta * margins).mean()
        return loss, {"accuracy": (margins > 0).float().mean().item(), "margin": margins.mean().item()}

    def rows(self, indices: Sequence[int]) -> list[int]:
        return [2 * i + side for i in indices for side in (0, 1)]

    def batch(self, indices: Sequence[int]) -> list[types.Datum]:
        return [self.datums[n] for n in self.rows(indices)]


def _whole(datum: types.Datum) -> types.ModelInput:
    return datum.model_input.append_int(datum.loss_fn_inputs["target_tokens"][-1])


def measure(client: mint.TrainingClient, preferences: Preferences, beta: float) -> dict[str, float]:
    indices = range(len(preferences))
    output = client.forward(preferences.batch(indices), "cross_entropy").result()
    loss, metrics = preferences.loss(indices, [o["logprobs"].to_torch() for o in output.loss_fn_outputs], beta)
    return {"test/loss": float(loss), **{f"test/{name}": value for name, value in metrics.items()}}


def main(config: Config) -> dict[str, float]:
    """The last line of metrics, with those of the held-out pairs."""
    log_path = Path(config.log_path)
    log_path.mkdir(parents=True, exist_ok=True)
    (log_path / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    client = mint.ServiceClient().create_lora_training_client(
        base_model=config.base_model, rank=config.lora_rank, seed=config.seed
    )
    tokenizer, reference = client.get_tokenizer(), client.save_weights_and_get_sampling_client()
    train, held_out = (Preferences(pairs, tokenizer, reference) for pairs in load_pairs(config))

    with (log_path / "metrics.jsonl").open("w", buffering=1) as metrics_file:
        for step in range(config.steps + 1):
            line: dict[str, float] = {"step": step}
            if step % config.eval_every == 0 or step == config.steps:
                line |= measure(client, held_out, config.beta)
            if step < config.steps:
                rate, start = config.learning_rate * (1 - step / config.steps), step * config.batch_size
                indices = [i % len(train) for i in range(start, start + config.batch_size)]

                def loss_fn(data: list[types.Datum], logprobs: list[torch.Tensor], indices: list[int] = indices) -> Any:
                    return train.loss(indices, logprobs, config.beta)

                gradient = client.forward_backward_custom(train.batch(indices), loss_fn)
                update = client.optim_step(types.AdamParams(learning_rate=rate, beta2=0.95))
                metrics = gradient.result().metrics
                line |= {"loss": metrics["loss:sum"], "accuracy": metrics["accuracy"], "margin": metrics["margin"]}
                update.result()
            metrics_file.write(json.dumps(line) + "\n")
            print(", ".join(f"{name}={value:.4g}" for name, value in line.items()))

    print(f"Checkpoint: {client.save_state('final').result().path}")
    return line


if __name__ == "__main__":
    main(configured(Config()))
