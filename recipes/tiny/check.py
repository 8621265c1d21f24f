"""Shows that mint/tiny can be improved by reinforcement learning, in plain torch and without the rest of MinT.

    python recipes/tiny/check.py --task addition --seeds 5

Measures the four tasks, then trains a rank-16 LoRA with group-centred advantages and prints held-out accuracy by step.
Simplified on purpose: one gradient step per batch of samples, so the importance ratio is 1 and REINFORCE is exact.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import EOS, arithmetic_prompt, calculator, chat, code, is_held_out, solve
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from words import OPENERS

TOOL_CALL = re.compile(r"<tool_call>(\d+)([-+*])(\d+)</tool_call>")


# --- tasks --------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    prompt: str
    gold: str
    reward: Callable[[str], float]  # of the last thing the model wrote
    has_tool: bool = False


def exact(prompt: str, gold: str, has_tool: bool = False) -> Problem:
    return Problem(prompt, gold, lambda text: float(text == gold), has_tool)


def addition(rng: random.Random, held_out: bool) -> Problem:
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if is_held_out(a, "+", b) == held_out:
            return exact(arithmetic_prompt(a, "+", b), f" {solve(a, '+', b)}")


def one_line_code(rng: random.Random, held_out: bool) -> Problem:
    (prompt, _), (answer, _) = code(rng, 0.0)
    return exact(prompt, answer.removesuffix(EOS))


def polite_chat(rng: random.Random, held_out: bool) -> Problem:
    """Judged on being polite, short and on topic, a third each."""
    while True:
        pieces = chat(rng, 0.0)
        gold = pieces[-1][0].removesuffix(EOS)
        opener = next((o for o in OPENERS if gold.startswith(o)), None)
        if opener:
            break
    topic = re.split(r" is | can ", gold.removeprefix(opener).strip())[0].lower()

    def judge(text: str) -> float:
        polite = any(o in text for o in OPENERS)
        return (polite + (len(text) <= 70) + (topic in text.lower())) / 3

    return Problem("".join(text for text, _ in pieces[:-1]), gold, judge)


def tool_use(rng: random.Random, held_out: bool) -> Problem:
    pieces = calculator(rng, 0.0)
    prompt = "".join(text for text, _ in pieces[:-3])
    return exact(prompt, pieces[-1][0].removesuffix(EOS), has_tool=True)


def tool_reply(written: str) -> str | None:
    """The calculator's turn, if what the model wrote is a call."""
    call = TOOL_CALL.fullmatch(written)
    if not call:
        return None
    result = solve(int(call[1]), call[2], int(call[3]))
    return f"\n<|im_start|>user\n<tool_response>{result}</tool_response>{EOS}\n<|im_start|>assistant\n"


# task: how to draw a problem, and how many tokens an answer may take
TASKS: dict[str, tuple[Callable[[random.Random, bool], Problem], int]] = {
    "addition": (addition, 8),
    "code": (one_line_code, 48),
    "chat": (polite_chat, 128),
    "tool": (tool_use, 32),
}


# --- sampling -----------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    tokens: list[int]
    mask: list[float]  # 1 where the model wrote the token
    reward: float


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], temperature: float, limit: int
) -> list[list[int]]:
    """Continuations including their end; temperature 0 is greedy."""
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=(ids != pad).long(),
        max_new_tokens=limit,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature else None,
    )
    rows = out[:, width:].tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in rows]


def roll_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], temperature: float, limit: int
) -> list[Rollout]:
    rollouts = [Rollout(tokenizer.encode(p.prompt), [], 0.0) for p in problems]
    for rollout in rollouts:
        rollout.mask = [0.0] * len(rollout.tokens)
    open_ones = list(range(len(problems)))
    for turn in range(2):  # the second turn only after a call of the tool
        written = sample(model, tokenizer, [rollouts[i].tokens for i in open_ones], temperature, limit)
        answered = []
        for i, tokens in zip(open_ones, written, strict=True):
            problem, rollout = problems[i], rollouts[i]
            text = tokenizer.decode(tokens).removesuffix(EOS)
            rollout.tokens += tokens
            rollout.mask += [1.0] * len(tokens)
            reply = tool_reply(text) if problem.has_tool and turn == 0 else None
            if reply is None:
                rollout.reward = problem.reward(text)
                continue
            given = tokenizer.encode(reply)
            rollout.tokens += given
            rollout.mask += [0.0] * len(given)
            answered.append(i)
        open_ones = answered
        if not open_ones:
            break
    return rollouts


def mean_reward(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: str, temperature: float, count: int
) -> float:
    draw, limit = TASKS[task]
    rng = random.Random(1234)
    problems = [draw(rng, True) for _ in range(count)]
    return sum(r.reward for r in roll_out(model, tokenizer, problems, temperature, limit)) / count


def accuracies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, count: int = 512
) -> dict[str, dict[str, float]]:
    """Mean reward per task, greedy and sampled at temperature 1."""
    return {
        task: {
            name: round(mean_reward(model, tokenizer, task, temperature, count), 3)
            for name, temperature in [("greedy", 0.0), ("sampled", 1.0)]
        }
        for task in TASKS
    }


# --- training -----------------------------------------------------------------------------------------------


class LoraLinear(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, rank: int = 16, alpha: float = 32.0) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def add_lora(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Puts an adapter on every linear layer, the output layer included; returns what is to be trained."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, LoraLinear(child))
    return [p for p in model.parameters() if p.requires_grad]


def policy_loss(model: PreTrainedModel, pad: int, rollouts: list[Rollout], advantages: list[float]) -> torch.Tensor:
    """Minus the sum over written tokens of advantage x log-probability; padding sits on the right, masked."""
    width = max(len(r.tokens) for r in rollouts)
    ids = torch.tensor([r.tokens + [pad] * (width - len(r.tokens)) for r in rollouts], device=model.device)
    scale = torch.tensor(
        [[a * m for m in r.mask] + [0.0] * (width - len(r.mask)) for r, a in zip(rollouts, advantages, strict=True)],
        device=model.device,
    )
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logprobs * scale[:, 1:]).sum()


@dataclass
class Settings:
    learning_rate: float
    temperature: float
    prompts: int = 16
    group: int = 8
    steps: int = 25
    evaluate_every: int = 5
    evaluate_on: int = 512
    sft_steps: int = 0
    sft_learning_rate: float = 5e-4


def supervise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
) -> None:
    """One step on 32 right answers."""
    draw, _ = TASKS[task]
    batch = []
    for problem in (draw(rng, False) for _ in range(32)):
        prompt, answer = tokenizer.encode(problem.prompt), tokenizer.encode(problem.gold + EOS)
        batch.append(Rollout(prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer), 1.0))
    policy_loss(model, tokenizer.pad_token_id, batch, [1.0] * len(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def reinforce(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: str, settings: Settings, seed: int
) -> list[tuple[int, float]]:
    """Held-out reward, sampled at temperature 1, before training and every few steps; negative steps are SFT."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    parameters = add_lora(model)
    draw, limit = TASKS[task]
    curve = [(-settings.sft_steps, mean_reward(model, tokenizer, task, 1.0, settings.evaluate_on))]
    if settings.sft_steps:
        optimizer = torch.optim.Adam(parameters, lr=settings.sft_learning_rate)
        for _ in range(settings.sft_steps):
            supervise(model, tokenizer, task, optimizer, rng)
        curve.append((0, mean_reward(model, tokenizer, task, 1.0, settings.evaluate_on)))
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    for step in range(1, settings.steps + 1):
        problems = [draw(rng, False) for _ in range(settings.prompts)]
        repeated = [problem for problem in problems for _ in range(settings.group)]
        rollouts = roll_out(model, tokenizer, repeated, settings.temperature, limit)
        rewards = torch.tensor([r.reward for r in rollouts]).view(settings.prompts, settings.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
        policy_loss(model, tokenizer.pad_token_id, rollouts, advantages).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % settings.evaluate_every == 0:
            curve.append((step, mean_reward(model, tokenizer, task, 1.0, settings.evaluate_on)))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "mint" / "models" / "tiny")
    parser.add_argument("--task", choices=[*TASKS, "none"], default="addition", help="none: only measure")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--evaluate-on", type=int, default=512, help="held-out problems per evaluation")
    parser.add_argument("--sft-steps", type=int, default=0, help="supervised steps on right answers before")
    parser.add_argument("--sft-lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.task == "none":
        print(json.dumps(accuracies(AutoModelForCausalLM.from_pretrained(args.model).to(device), tokenizer)))
        return
    settings = Settings(
        args.lr,
        args.temperature,
        steps=args.steps,
        evaluate_every=args.evaluate_every,
        evaluate_on=args.evaluate_on,
        sft_steps=args.sft_steps,
        sft_learning_rate=args.sft_lr,
    )
    for seed in range(args.seeds):
        model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
        started = time.time()
        curve = reinforce(model, tokenizer, args.task, settings, seed)
        points = " ".join(f"{step}:{reward:.3f}" for step, reward in curve)
        print(f"{args.task} seed {seed} {points} ({time.time() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
