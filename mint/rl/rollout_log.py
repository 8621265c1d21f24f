"""Rollouts as records for the run directory, and the few a person reads after every step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mint.rl.prompt_check import oddity
from mint.rl.rundir import RolloutRecord, TurnRecord
from mint.rl.sampler import SampledGroup
from mint.rl.types import Trajectory, TrajectoryGroup
from mint.rl.update import Trained

MemberKey = tuple[int, int]
"""(number of the group in its step, member)."""
KEPT_PROMPTS = 1024


class TextOf:
    """A tokenizer's decoding, each token's own text remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pieces: dict[int, str] = {}
        self.oddities: dict[tuple[int, ...], str | None] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens))) if len(tokens) else ""

    def piece(self, token: int) -> str:
        if token not in self.pieces:
            self.pieces[token] = self.text([token])
        return self.pieces[token]

    def oddity(self, prompt: Sequence[int]) -> str | None:
        """See `mint.rl.prompt_check`; asked once a prompt, as the members of a group share it."""
        key = tuple(prompt)
        if key not in self.oddities:
            if len(self.oddities) >= KEPT_PROMPTS:
                self.oddities.clear()
            self.oddities[key] = oddity(self.tokenizer, prompt, self.text(prompt)) if prompt else None
        return self.oddities[key]


class _Tokens:
    """A trajectory as one run of tokens after its first prompt."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self.trained: list[bool] = []
        self.turns: list[TurnRecord] = []
        context: list[int] = []
        for turn, transition in enumerate(trajectory.transitions):
            observation = transition.ob.to_ints()
            restarts = observation[: len(context)] != context
            if turn == 0:
                self.prompt = observation
            else:
                self._extend(observation if restarts else observation[len(context) :])
            start = len(self.completion)
            self._extend(transition.ac.tokens, transition.ac.maybe_logprobs or [], True, transition.trained)
            context = observation + transition.ac.tokens
            self.turns.append(
                TurnRecord(
                    start,
                    len(self.completion),
                    transition.reward,
                    restarts and turn > 0,
                    dict(transition.metrics),
                    dict(transition.logs),
                )
            )

    def _extend(
        self, tokens: Sequence[int], logprobs: Sequence[float] = (), sampled: bool = False, trained: bool = False
    ) -> None:
        self.completion += tokens
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.mask += [int(sampled)] * len(tokens)
        self.trained += [trained] * len(tokens)

    def spread(self, values: np.ndarray) -> list[float] | None:
        """One value a trained token, put in its place; zeros elsewhere."""
        if len(values) != sum(self.trained):
            return None
        result = np.zeros(len(self.completion))
        result[np.array(self.trained, dtype=bool)] = values
        return result.tolist()


def rollout_records(
    step: int,
    temperature: float,
    groups: Iterable[SampledGroup],
    text: TextOf,
    advantages: dict[int, np.ndarray] | None = None,
    trained: Trained | None = None,
) -> list[RolloutRecord]:
    """One record a member. Without `advantages` and `trained` they are those of an evaluation."""
    sent = _by_member(trained) if trained is not None else {}
    records = []
    for sampled in groups:
        if sampled.wrapped is None:
            continue
        rewards_G = sampled.group.get_total_rewards()
        for member, trajectory in enumerate(sampled.group.trajectories_G):
            tokens = _Tokens(trajectory)
            token_advantages, logprobs, reference = sent.get((sampled.number, member), (None, None, None))
            known = (advantages or {}).get(sampled.number)
            records.append(
                RolloutRecord(
                    step=step,
                    group=sampled.number,
                    member=member,
                    policy_version=sampled.wrapped.sampling_client_step,
                    temperature=temperature,
                    reward=rewards_G[member],
                    final_reward=sampled.group.final_rewards_G[member],
                    reward_terms=_terms(sampled.group, member),
                    advantage=None if known is None or np.isnan(known[member]) else float(known[member]),
                    trained=token_advantages is not None,
                    stop_reason=None if trajectory.stop_reason is None else str(trajectory.stop_reason),
                    tags=list(sampled.wrapped.env_group_builder.logging_tags()),
                    problem=sampled.wrapped.env_group_builder.problem_id(),
                    prompt_text=text.text(tokens.prompt),
                    prompt_oddity=text.oddity(tokens.prompt),
                    completion_text=text.text(tokens.completion),
                    prompt_tokens=tokens.prompt,
                    completion_tokens=tokens.completion,
                    completion_pieces=[text.piece(token) for token in tokens.completion],
                    mask=tokens.mask,
                    logprobs=tokens.logprobs,
                    advantages=None if token_advantages is None else tokens.spread(token_advantages),
                    train_logprobs=None if logprobs is None else tokens.spread(logprobs),
                    reference_logprobs=None if reference is None else tokens.spread(reference),
                    turns=tokens.turns,
                )
            )
    return records


def _terms(group: TrajectoryGroup, member: int) -> dict[str, float]:
    """Metrics of the turns, summed, and of the group."""
    terms: dict[str, float] = defaultdict(float)
    for transition in group.trajectories_G[member].transitions:
        for name, value in transition.metrics.items():
            terms[name] += value
    return dict(terms) | dict(group.metrics_G[member])


def _by_member(trained: Trained) -> dict[MemberKey, tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Of every trained token, in the order of the trajectory: its advantage, the trainer's log-prob and, in a run with
    a KL term, the reference's."""
    collected: dict[MemberKey, list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]] = defaultdict(list)
    for datum, meta, logprobs in zip(trained.data_D, trained.metadata_D, trained.logprobs_D, strict=True):
        mask = datum.loss_fn_inputs["mask"].to_numpy() > 0
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()[mask]
        known = datum.loss_fn_inputs.get("reference_logprobs")
        reference = None if known is None else known.to_numpy()[mask]
        collected[meta["group_idx"], meta["traj_idx"]].append((advantages, logprobs[mask], reference))
    return {key: _joined(parts) for key, parts in collected.items()}


def _joined(
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    advantages, logprobs, references = zip(*parts, strict=True)
    known = [reference for reference in references if reference is not None]
    reference = np.concatenate(known) if len(known) == len(parts) else None
    return np.concatenate(advantages), np.concatenate(logprobs), reference


# --------------------------------------------------------------------------------------------------------------------
# Choosing what to show


def best_worst_random(scores: Sequence[float], count: int, seed: int) -> list[int]:
    """Indices of the best, the worst and then random others, at most `count`, in order."""
    if len(scores) <= count:
        return list(range(len(scores)))
    order = sorted(range(len(scores)), key=scores.__getitem__)
    others = order[1:-1]
    random.Random(seed).shuffle(others)
    return sorted([order[-1], order[0], *others][:count])


def choose_groups(groups: Sequence[SampledGroup], count: int, seed: int) -> list[SampledGroup]:
    usable = [sampled for sampled in groups if sampled.wrapped is not None]
    means = [float(np.mean(sampled.group.get_total_rewards())) for sampled in usable]
    return [usable[i] for i in best_worst_random(means, count, seed)]


def shown(record: RolloutRecord) -> str:
    """A rollout for a person."""
    head = f"group {record.group}, member {record.member}: reward {record.reward:.3g}"
    if record.advantage is not None:
        head += f", advantage {record.advantage:+.3g}"
    length = f"{sum(record.mask)} tokens, {record.stop_reason or 'no stop reason'}"
    terms = "".join(f", {name} {value:.3g}" for name, value in record.reward_terms.items())
    return f"{head}, {length}{terms}\n  prompt:     {record.prompt_text!r}\n  completion: {record.completion_text!r}"
