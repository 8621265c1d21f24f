"""Supervised fine-tuning on the raw client: prompts and answers in, a checkpoint out.

    python recipes/sl_loop.py                                    # additions, on the bundled model
    python recipes/sl_loop.py data=chats.jsonl base_model=Qwen/Qwen3-0.6B learning_rate=2e-4

`data` holds one {"prompt": ..., "completion": ...} a line; the last tenth of it is kept for measuring. What was left
out on purpose: packing (the server packs), shuffling across epochs, resume. `mint.rl.train` has the grown-up loop.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arguments import configured

import mint
from mint import types
from mint.recipes.addition import answer_of, draw_problems, prompt_of


@dataclass(frozen=True)
class Config:
    base_model: str = "mint/tiny"
    data: str = ""
    """A JSONL file; empty: additions."""
    log_path: str = "runs/sl_loop"
    steps: int = 40
    batch_size: int = 32
    learning_rate: float = 1e-3
    """At the first step; it falls evenly to 0."""
    lora_rank: int = 16
    eval_every: int = 10
    seed: int = 0


Example = tuple[str, str]
"""(prompt, completion)."""


def load_examples(config: Config) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples."""
    if config.data:
        lines = [json.loads(line) for line in Path(config.data).read_text().splitlines()]
        examples = [(line["prompt"], line["completion"]) for line in lines]
        border = len(examples) - max(1, len(examples) // 10)
        return examples[:border], examples[border:]
    rng = random.Random(config.seed)
    train = draw_problems(rng, config.steps * config.batch_size)
    held_out = draw_problems(rng, 100, held_out=True)
    as_examples = [[(prompt_of(p), answer_of(p)) for p in problems] for problems in (train, held_out)]
    return as_examples[0], as_examples[1]


def to_datum(example: Example, tokenizer: Any) -> types.Datum:
    """Input t[:-1], target t[1:]; the loss counts only the completion and the token that ends it."""
    prompt = tokenizer.encode(example[0])
    completion = [*tokenizer.encode(example[1], add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(completion)},
    )


def loss_per_token(output: types.ForwardBackwardOutput, data: Sequence[types.Datum]) -> float:
    """The loss is a plain sum over tokens, so that batches add up; people read means."""
    return output.metrics["loss:sum"] / sum(sum(datum.loss_fn_inputs["weights"]) for datum in data)


def main(config: Config) -> float:
    """The held-out loss of the final weights."""
    log_path = Path(config.log_path)
    log_path.mkdir(parents=True, exist_ok=True)
    (log_path / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    client = mint.ServiceClient().create_lora_training_client(
        base_model=config.base_model, rank=config.lora_rank, seed=config.seed
    )
    tokenizer = client.get_tokenizer()
    train, held_out = ([to_datum(e, tokenizer) for e in examples] for examples in load_examples(config))

    with (log_path / "metrics.jsonl").open("w", buffering=1) as metrics_file:
        for step in range(config.steps + 1):
            line: dict[str, float] = {"step": step}
            if step % config.eval_every == 0 or step == config.steps:
                line["test/nll"] = loss_per_token(client.forward(held_out, "cross_entropy").result(), held_out)
            if step < config.steps:
                rate = config.learning_rate * (1 - step / config.steps)
                start = step * config.batch_size
                batch = [train[i % len(train)] for i in range(start, start + config.batch_size)]
                # Both are sent before either is waited for: the server never idles between them.
                gradient = client.forward_backward(batch, "cross_entropy")
                update = client.optim_step(types.AdamParams(learning_rate=rate, beta2=0.95))
                line |= {"optim/lr": rate, "train/nll": loss_per_token(gradient.result(), batch)}
                update.result()
            metrics_file.write(json.dumps(line) + "\n")
            print(", ".join(f"{name}={value:.4g}" for name, value in line.items()))

    print(f"Checkpoint: {client.save_state('final').result().path}")
    return line["test/nll"]


if __name__ == "__main__":
    main(configured(Config()))
