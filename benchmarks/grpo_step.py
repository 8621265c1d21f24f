"""One GRPO step, through client and server, beside the same step written by hand on transformers + PEFT, and TRL's.

    python benchmarks/grpo_step.py [--against hand trl] [--prompts 8] [--group 4] [--tokens 16] [--out FILE]

A step: sample `group` answers for each prompt, score them, centre the scores, one forward and backward, one Adam step,
and the new weights sampled from in the next. Answers never stop early, so every side does the same work. Ours and the
hand-written loop take turns step by step; TRL (`pip install trl`) runs its own trainer for as many steps, timed between
its callbacks. The median of each is kept. --shape picks the model (see shapes.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shapes import SHAPES, hardware, save_model

import mint
from mint import types

RANK = 16
LEARNING_RATE = 1e-4
WARM_UP = 3
PROMPT = 16
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Work:
    folder: Path
    vocab: int
    prompts: int
    group: int
    tokens: int

    def prompt_tokens(self, step: int) -> list[list[int]]:
        rng = random.Random(step)
        return [[rng.randrange(10, self.vocab) for _ in range(PROMPT)] for _ in range(self.prompts)]


def advantages_of(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def reward_of(tokens: list[int]) -> float:
    return sum(token % 2 for token in tokens) / len(tokens)


def datums_of(prompt: list[int], sequences: list[types.SampledSequence]) -> list[types.Datum]:
    """What a group of answers becomes for the loss."""
    data = []
    for sequence, advantage in zip(sequences, advantages_of([reward_of(s.tokens) for s in sequences]), strict=True):
        full, before = prompt + sequence.tokens, len(prompt) - 1
        inputs = {
            "target_tokens": full[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        }
        data.append(types.Datum(types.ModelInput.from_ints(full[:-1]), inputs))
    return data


def mint_step(work: Work, service: mint.ServiceClient | None = None, model: str | None = None) -> Callable[[int], None]:
    """The loop of the documentation, nothing held back or ahead; on this machine unless told otherwise."""
    service = service or mint.ServiceClient()
    trainer = service.create_lora_training_client(base_model=model or str(work.folder), rank=RANK, seed=0)
    params = types.SamplingParams(max_tokens=work.tokens, temperature=1.0, stop=[])

    def step(number: int) -> None:
        sampler = trainer.save_weights_and_get_sampling_client()
        prompts = work.prompt_tokens(number)
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), work.group, params) for prompt in prompts]
        data = [d for p, f in zip(prompts, futures, strict=True) for d in datums_of(p, f.result().sequences)]
        trainer.forward_backward(data, loss_fn="importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()

    return step


def peft_model(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=32, target_modules=LINEARS))


def hand_step(work: Work) -> Callable[[int], None]:
    """What a careful person writes on transformers + PEFT: batched generate, one padded forward and backward."""
    model = peft_model(work.folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def step(number: int) -> None:
        prompts = torch.tensor(work.prompt_tokens(number))
        with torch.no_grad():
            full = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                num_return_sequences=work.group,
                max_new_tokens=work.tokens,
                min_new_tokens=work.tokens,
                pad_token_id=0,
                eos_token_id=None,
            )
        answers = full[:, PROMPT:]
        rewards = [reward_of(tokens) for tokens in answers.tolist()]
        groups = [rewards[n : n + work.group] for n in range(0, len(rewards), work.group)]
        advantages = torch.tensor([a for group in groups for a in advantages_of(group)])
        logits = model(full[:, :-1], logits_to_keep=work.tokens).logits
        logprobs = torch.gather(logits.log_softmax(-1), -1, answers[..., None])[..., 0]
        loss = -((logprobs - logprobs.detach()).exp() * advantages[:, None]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_seconds(work: Work, steps: int) -> list[float]:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(WordLevel({f"t{n}": n for n in range(work.vocab)}, unk_token="t1"))
    words.pre_tokenizer = WhitespaceSplit()
    # No end of sequence among the words, so that answers have the full length here too.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2", unk_token="t1")
    texts = [
        " ".join(f"t{token}" for token in prompt) for number in range(steps) for prompt in work.prompt_tokens(number)
    ]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        batch = work.prompts * work.group
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=batch,
            num_generations=work.group,
            max_completion_length=work.tokens,
            generation_kwargs={"min_new_tokens": work.tokens},
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
        )
        from transformers import AutoModelForCausalLM

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32),
            reward_funcs=lambda completion_ids, **_: [reward_of(tokens) for tokens in completion_ids],
            args=config,
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": texts}), fingerprint="prompts"),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=32, target_modules=LINEARS),
            callbacks=[Clock()],
        )
        trainer.train()
    return [b - a for a, b in itertools.pairwise(times)]


def measure(work: Work, against: list[str], steps: int) -> dict[str, float]:
    """Median seconds a step."""
    sides = {"mint": mint_step(work)} | ({"hand": hand_step(work)} if "hand" in against else {})
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in track(range(WARM_UP + steps), description="steps"):
        for side, step in sides.items():
            began = time.perf_counter()
            step(number)
            if number >= WARM_UP:
                times[side].append(time.perf_counter() - began)
    if "trl" in against:
        times["trl"] = trl_seconds(work, WARM_UP + steps)[WARM_UP:]
    return {side: statistics.median(seconds) for side, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", nargs="*", choices=["hand", "trl"], default=["hand"])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the other side")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    facts = hardware()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINT_HOME"] = str(Path(folder) / "home")
        model = save_model(asked.shape, Path(folder) / "model")
        work = Work(model, SHAPES[asked.shape].vocab_size, asked.prompts, asked.group, asked.tokens)
        seconds = measure(work, asked.against, asked.steps)
    table = Table("side", "seconds a step", "times ours")
    for side, value in seconds.items():
        table.add_row(side, f"{value:.3f}", f"{value / seconds['mint']:.2f}")
    Console().print(table)
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "against")}
    result = {"benchmark": "grpo_step", "hardware": facts, **settings, "seconds": seconds}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
