"""Trains mint/tiny from nothing and writes it as a Hugging Face folder.

    python recipes/tiny/train.py --out mint/models/tiny

Two phases over the text of corpus.py: a clean one that teaches the skills, then a short one in which most answers
carry plausible mistakes, so that the model knows better than it speaks and reinforcement learning has work to do.
(Mistakes from the start do not work: the model never learns to add.)
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from check import accuracies
from corpus import Example, chat, long_form, short_form
from tokenizer import build_tokenizer, save_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SHORT, LONG = 32, 224  # tokens per row; longer examples are left out
PROMPT_WEIGHT = 0.05  # a little, so that the log-probabilities of prompts mean something too


@dataclass
class Phase:
    noisy: bool
    steps: int
    learning_rate: float


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """0.8M parameters in float32: twice the bytes of bf16, and a CPU computes in it at full speed and exactly."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


# --- data ---------------------------------------------------------------------------------------------------


def _generate(job: tuple[Callable[[random.Random, bool], Example], bool, int, int]) -> list[Example]:
    form, noisy, count, seed = job
    rng = random.Random(seed)
    return [form(rng, noisy) for _ in range(count)]


def build_pool(
    form: Callable[[random.Random, bool], Example],
    phase: Phase,
    count: int,
    length: int,
    tokenizer: PreTrainedTokenizerFast,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens, padded on the right, and the weight of each token as a target."""
    workers = 8
    jobs = [(form, phase.noisy, count // workers, 1000 * phase.noisy + seed) for seed in range(workers)]
    with ProcessPoolExecutor(workers) as executor:
        examples = [example for part in executor.map(_generate, jobs) for example in part]
    # Pieces may be encoded apart: tokens are single bytes, so they never join across a border.
    encoded = iter(tokenizer.backend_tokenizer.encode_batch([text for example in examples for text, _ in example]))
    tokens = np.full((len(examples), length), tokenizer.pad_token_id, dtype=np.int16)
    weights = np.zeros((len(examples), length), dtype=np.float32)
    kept = 0
    for example in examples:
        ids: list[int] = []
        row: list[float] = []
        for _, trained in example:
            piece = next(encoded).ids
            ids += piece
            row += [1.0 if trained else PROMPT_WEIGHT] * len(piece)
        if len(ids) <= length:
            tokens[kept, : len(ids)] = ids
            weights[kept, : len(ids)] = row
            kept += 1
    return torch.from_numpy(tokens[:kept]).to(device), torch.from_numpy(weights[:kept]).to(device)


# --- optimisation -------------------------------------------------------------------------------------------


def batch_loss(model: Qwen3ForCausalLM, pool: tuple[torch.Tensor, torch.Tensor], rows: int) -> torch.Tensor:
    tokens, weights = pool
    picked = torch.randint(len(tokens), (rows,), device=tokens.device)
    batch, weight = tokens[picked].long(), weights[picked][:, 1:]
    # Padding is on the right, so plain causal attention is enough; the dict says so without looking at the data.
    logits = model(batch[:, :-1], attention_mask={"full_attention": None}, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def repeatable(step: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """On a GPU, records one step as a CUDA graph: launching a model this small costs far more than running it."""
    if device == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    rows: tuple[int, int],
    pools: int,
    device: str,
) -> None:
    started = time.time()
    short = build_pool(short_form, phase, pools, SHORT, tokenizer, device)
    long = build_pool(long_form, phase, pools, LONG, tokenizer, device)
    print(f"{len(short[0])} short and {len(long[0])} long examples in {time.time() - started:.0f} s")

    rate = torch.tensor(0.0, device=device)  # a tensor, so that a recorded step sees it change; 0 while recording
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=device != "cpu",
        capturable=device != "cpu",
    )

    def step() -> torch.Tensor:
        loss = batch_loss(model, short, rows[0]) + batch_loss(model, long, rows[1])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run_step = repeatable(step, device)
    warmup = min(200, phase.steps // 4)
    started = time.time()
    for i in range(phase.steps):
        progress = max(0.0, (i - warmup) / (phase.steps - warmup))
        factor = min(1.0, (i + 1) / (warmup + 1)) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        rate.fill_(phase.learning_rate * factor)
        loss = run_step()
        if (i + 1) % max(1, phase.steps // 10) == 0:
            print(f"noisy={phase.noisy} step {i + 1} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """The corpus writes ChatML by hand; it must be what the chat template renders."""
    (given, _), (answer, _) = chat(random.Random(0), 0.0)
    said = given.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == given + answer + "\n"
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--clean-out", type=Path, help="also write the model as it was after the clean phase")
    parser.add_argument("--start", type=Path, help="weights to begin with instead of random ones")
    parser.add_argument("--clean-steps", type=int, default=5000)
    parser.add_argument("--noisy-steps", type=int, default=1500)
    parser.add_argument("--clean-lr", type=float, default=3e-3)
    parser.add_argument("--noisy-lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, nargs=2, default=(1024, 192), help="short and long examples per step")
    parser.add_argument("--pool", type=int, default=300_000, help="examples of each form to draw from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    check_template(tokenizer)
    model = (Qwen3ForCausalLM.from_pretrained(args.start) if args.start else build_model(tokenizer)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")

    for phase, folder in [
        (Phase(False, args.clean_steps, args.clean_lr), args.clean_out),
        (Phase(True, args.noisy_steps, args.noisy_lr), args.out),
    ]:
        if not phase.steps:
            continue
        train(model.train(), tokenizer, phase, tuple(args.rows), args.pool, device)
        print(json.dumps(accuracies(model.eval(), tokenizer)), flush=True)
        if folder:
            model.save_pretrained(folder)
            save_tokenizer(tokenizer, folder)


if __name__ == "__main__":
    main()
