"""A rollout of a loop that is recorded: its turns as they were sampled, what it earned, and the datum it became.

How turns and datums are seen on the wire is in `watched`; what is written of them in `recorder`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mint.rl.types import (
    Logs,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    Transition,
)
from mint.rl.update import Trained
from mint.rl.watched import SampleCall, TrainCall
from mint.types import Datum, ForwardBackwardOutput, ModelInput, SampledSequence, TensorData


@dataclass
class Scored:
    """A rollout: its turns, each with the call that sampled it, and what it earned."""

    turns: list[tuple[SampleCall, SampledSequence]]
    group: object
    reward: float
    problem: str | None
    metrics: dict[str, float]
    logs: Logs
    sent: Datum | None = None
    """As the trainer got it: inputs of the whole sequence, mask 1 where tokens were sampled."""
    train_logprobs: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        call, sequence = self.turns[-1]
        return call.prompt + sequence.tokens

    def sampled_positions(self) -> list[int]:
        """Of the targets, which are the tokens moved by one. Turns that the last prompt does not contain are left out:
        they belong to other datums."""
        whole = self.tokens
        positions: list[int] = []
        for call, sequence in self.turns:
            end = len(call.prompt) + len(sequence.tokens)
            if whole[:end] == call.prompt + sequence.tokens:
                positions += range(len(call.prompt) - 1, end - 1)
        return positions

    def trajectory(self) -> Trajectory:
        """With the log-probs as they were sent, where they were: those are what enters the ratio."""
        sent = None if self.sent is None else self.sent.loss_fn_inputs["logprobs"].to_numpy()
        transitions = []
        for turn, (call, sequence) in enumerate(self.turns):
            last = turn == len(self.turns) - 1
            logprobs = sequence.logprobs
            if sent is not None and self.tokens[: len(call.prompt)] == call.prompt:
                logprobs = sent[len(call.prompt) - 1 :][: len(sequence.tokens)].tolist()
            action = TokensWithLogprobs(sequence.tokens, logprobs, sequence.stop_reason)
            reward = self.reward if last else 0.0
            metrics, logs = (dict(self.metrics), dict(self.logs)) if last else ({}, {})
            transitions.append(Transition(ModelInput.from_ints(call.prompt), action, reward, last, metrics, logs))
        ended = StopReason.MAX_TOKENS if self.turns[-1][1].stop_reason == "length" else StopReason.COMPLETED
        return Trajectory(transitions, None, ended)

    def mean_advantage(self) -> float:
        """Over the sampled tokens, as sent; NaN if it was not."""
        if self.sent is None:
            return float("nan")
        mask = self.sent.loss_fn_inputs["mask"].to_numpy() > 0
        return float(self.sent.loss_fn_inputs["advantages"].to_numpy()[mask].mean())


def by_group(scored: Sequence[Scored]) -> list[list[Scored]]:
    groups: dict[object, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.group].append(one)
    return list(groups.values())


def give_datums(scored: Sequence[Scored], call: TrainCall, output: ForwardBackwardOutput) -> int:
    """Gives every datum to the rollout it was made from; how many belong to none."""
    owners: dict[tuple[int, ...], list[Scored]] = defaultdict(list)
    for one in scored:
        owners[tuple(one.tokens)].append(one)
    unknown = 0
    for datum, result in zip(call.data_D, output.loss_fn_outputs, strict=True):
        inputs = datum.loss_fn_inputs
        if "advantages" not in inputs:
            continue
        of_these = owners.get((*datum.model_input.to_ints(), int(inputs["target_tokens"].to_numpy()[-1])), [])
        unknown += not of_these
        owner = next((one for one in of_these if one.sent is None), None)  # one sent again stays as it was first
        if owner is not None:
            owner.sent = _as_sent(datum, owner.sampled_positions())
            owner.train_logprobs = np.asarray(result["logprobs"].to_numpy(), dtype=np.float64)
    return unknown


def _as_sent(datum: Datum, positions: Sequence[int]) -> Datum:
    """The datum with the mask where tokens were sampled, and the advantages times the weights."""
    inputs = {name: value.to_numpy().astype(np.float64) for name, value in datum.loss_fn_inputs.items()}
    weight = next((inputs[name] for name in ("weights", "loss_weights", "mask") if name in inputs), 1.0)
    mask = np.zeros(datum.model_input.length)
    mask[list(positions)] = 1.0
    return Datum(
        datum.model_input,
        {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": TensorData.of(inputs.get("logprobs", np.zeros(len(mask))), "float32"),
            "advantages": TensorData.of(inputs["advantages"] * weight, "float32"),
            "mask": TensorData.of(mask, "float32"),
        },
    )


def trained_of(scored_P: Sequence[Sequence[Scored]]) -> Trained:
    trained = Trained()
    for number, members in enumerate(scored_P):
        for member, one in enumerate(members):
            if one.sent is not None and one.train_logprobs is not None:
                trained.data_D.append(one.sent)
                trained.metadata_D.append({"group_idx": number, "traj_idx": member})
                trained.logprobs_D.append(one.train_logprobs)
    return trained


def advantages_of(scored_P: Sequence[Sequence[Scored]]) -> dict[int, np.ndarray]:
    """Of each member, as sent, NaN if it was not; nothing for groups of which none was."""
    return {
        number: np.array([one.mean_advantage() for one in members])
        for number, members in enumerate(scored_P)
        if any(one.sent is not None for one in members)
    }
