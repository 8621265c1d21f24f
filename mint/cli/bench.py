"""`mint bench`: what this machine, or a server, does in a second."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.output import Address, AsJson, counted, print_table

if TYPE_CHECKING:
    import mint

PROMPT_TOKENS = 32


def bench(
    model: Annotated[str, typer.Option(help="Base model.")] = "mint/tiny",
    sequences: Annotated[int, typer.Option(min=1, help="Sampled and trained on at a time.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled in each sequence.")] = 64,
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA adapter.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Times each figure is taken; the best counts.")] = 3,
    base_url: Address = None,
    as_json: AsJson = False,
) -> None:
    """Measure sampling, training and how soon a new policy is sampled. The last line is JSON."""
    import mint

    with mint.ServiceClient(base_url) as service:
        trainer = service.create_lora_training_client(base_model=model, rank=rank)
        figures: dict[str, list[float]] = {}
        for _ in counted(range(repeat + 1), f"measuring {model}", repeat + 1):
            for name, value in _measure(trainer, sequences, tokens).items():
                figures.setdefault(name, []).append(value)
    # The first round warms up caches and compiles; machines shared with other work only ever slow a measurement down.
    best = {name: (min if "ms" in name else max)(values[1:]) for name, values in figures.items()}
    if not as_json:
        print_table(("figure", "value"), [(name, f"{value:,.1f}") for name, value in best.items()], ("value",))
    settings = {"model": model, "sequences": sequences, "tokens": tokens, "rank": rank, "repeat": repeat}
    typer.echo(json.dumps(settings | {name: round(value, 3) for name, value in best.items()}))


def _measure(trainer: mint.TrainingClient, sequences: int, tokens: int) -> dict[str, float]:
    from mint import types

    prompt = types.ModelInput.from_ints([65 + n % 26 for n in range(PROMPT_TOKENS)])
    begun = time.perf_counter()
    sampler = trainer.save_weights_and_get_sampling_client()
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    first_token = time.perf_counter() - begun

    def sample(count: int) -> tuple[float, list[Any]]:
        params = types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=0)
        begun = time.perf_counter()
        found = sampler.sample(prompt, count, params).result().sequences
        return sum(len(one.tokens) for one in found) / (time.perf_counter() - begun), found

    alone, _ = sample(1)
    together, found = sample(sequences)
    data = [_datum(prompt.to_ints(), one) for one in found if one.tokens]
    begun = time.perf_counter()
    trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(types.AdamParams(learning_rate=1e-6)).result()
    trained = sum(datum.model_input.length for datum in data) / (time.perf_counter() - begun)
    return {
        "sampled tokens/s, one sequence": alone,
        f"sampled tokens/s, {sequences} sequences": together,
        "trained tokens/s": trained,
        "first token of a new policy, ms": 1000 * first_token,
    }


def _datum(prompt: list[int], sequence: Any) -> Any:
    from mint import types

    full, before = prompt + sequence.tokens, len(prompt) - 1
    after = len(sequence.tokens)
    inputs: dict[str, Any] = {
        "target_tokens": full[1:],
        "weights": [0.0] * before + [1.0] * after,
        "logprobs": [0.0] * before + list(sequence.logprobs),
        "advantages": [0.0] * before + [1.0] * after,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs)
