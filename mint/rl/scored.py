"""A rollout of a loop that is recorded: its turns as they were sampled, what it earned, and the datums it became.

A loop sends the turns of an episode in one datum, or each in one of its own; either way every turn is found again. How
turns and datums are seen on the wire is in `watched`; what is written of them in `recorder`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Turn:
    call: SampleCall
    sequence: SampledSequence

    @property
    def tokens(self) -> list[int]:
        return self.call.prompt + self.sequence.tokens

    @property
    def positions(self) -> slice:
        """Of its sampled tokens among the targets, which are the tokens moved by one."""
        start = len(self.call.prompt) - 1
        return slice(start, start + len(self.sequence.tokens))


@dataclass(frozen=True)
class Sent:
    """One datum as the trainer got it, one value a target."""

    logprobs: np.ndarray
    advantages: np.ndarray
    """Times the weights."""
    train_logprobs: np.ndarray


@dataclass
class Scored:
    """A rollout: its turns, each with the call that sampled it, and what it earned."""

    turns: list[Turn]
    group: object
    reward: float
    problem: str | None
    metrics: dict[str, float]
    logs: Logs
    sent: dict[int, Sent] = field(default_factory=dict)
    """By the turn that a datum ends with."""
    strays: int = 0
    """Tokens that were sent with an advantage and had not been sampled."""

    def take(self, last: int, sent: Sent) -> None:
        self.sent[last] = sent
        sampled = np.zeros(len(sent.advantages), dtype=bool)
        for number in range(last + 1):
            if self._holds(last, number):
                sampled[self.turns[number].positions] = True
        self.strays += int(((sent.advantages != 0) & ~sampled).sum())

    def _holds(self, last: int, number: int) -> bool:
        tokens = self.turns[number].tokens
        return self.turns[last].tokens[: len(tokens)] == tokens

    def sent_turn(self, number: int) -> Sent | None:
        """A turn as it was trained on: by the datum that gives it an advantage, else by any that holds it."""
        where = self.turns[number].positions
        holding = [self.sent[last] for last in sorted(self.sent) if last >= number and self._holds(last, number)]
        parts = [Sent(one.logprobs[where], one.advantages[where], one.train_logprobs[where]) for one in holding]
        return next((part for part in parts if part.advantages.any()), parts[0] if parts else None)

    def trajectory(self) -> Trajectory:
        """With the log-probs as they were sent, where they were: those are what enters the ratio."""
        transitions = []
        for number, turn in enumerate(self.turns):
            last, sequence, sent = number == len(self.turns) - 1, turn.sequence, self.sent_turn(number)
            logprobs = sequence.logprobs if sent is None else sent.logprobs.tolist()
            action = TokensWithLogprobs(sequence.tokens, logprobs, sequence.stop_reason)
            reward = self.reward if last else 0.0
            metrics, logs = (dict(self.metrics), dict(self.logs)) if last else ({}, {})
            transitions.append(Transition(ModelInput.from_ints(turn.call.prompt), action, reward, last, metrics, logs))
        ended = StopReason.MAX_TOKENS if self.turns[-1].sequence.stop_reason == "length" else StopReason.COMPLETED
        return Trajectory(transitions, None, ended)

    def mean_advantage(self) -> float:
        """Over the sampled tokens that were sent; NaN if none was."""
        parts = [sent.advantages for number in range(len(self.turns)) if (sent := self.sent_turn(number)) is not None]
        return float(np.concatenate(parts).mean()) if any(map(len, parts)) else float("nan")

    def datums(self) -> list[tuple[Datum, np.ndarray]]:
        """One a turn, its sampled tokens in the mask, and the trainer's log-probs. A turn that was never sent has no
        advantage."""
        return [self._datum(number) for number in range(len(self.turns))] if self.sent else []

    def _datum(self, number: int) -> tuple[Datum, np.ndarray]:
        turn, sent = self.turns[number], self.sent_turn(number)
        if sent is None:
            logprobs = np.array(turn.sequence.logprobs or [0.0] * len(turn.sequence.tokens))
            sent = Sent(logprobs, np.zeros(len(logprobs)), logprobs)
        whole = {"logprobs": sent.logprobs, "advantages": sent.advantages, "mask": np.ones(len(sent.logprobs))}
        inputs = {"target_tokens": TensorData.of(turn.tokens[1:], "int64")}
        inputs |= {name: TensorData.of(self._placed(turn, values), "float32") for name, values in whole.items()}
        return Datum(ModelInput.from_ints(turn.tokens[:-1]), inputs), self._placed(turn, sent.train_logprobs)

    @staticmethod
    def _placed(turn: Turn, values: np.ndarray) -> np.ndarray:
        """One value a target: those of the sampled tokens, zeros before."""
        result = np.zeros(len(turn.tokens) - 1)
        result[turn.positions] = values
        return result


def by_group(scored: Sequence[Scored]) -> list[list[Scored]]:
    groups: dict[object, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.group].append(one)
    return list(groups.values())


def give_datums(scored: Sequence[Scored], call: TrainCall, output: ForwardBackwardOutput) -> int:
    """Gives every datum to the rollout it was made from; how many belong to none."""
    owners: dict[tuple[int, ...], list[tuple[Scored, int]]] = defaultdict(list)
    for one in scored:
        for number, turn in enumerate(one.turns):
            owners[tuple(turn.tokens)].append((one, number))
    unknown = 0
    for datum, result in zip(call.data_D, output.loss_fn_outputs, strict=True):
        inputs = datum.loss_fn_inputs
        if "advantages" not in inputs:
            continue
        of_these = owners.get((*datum.model_input.to_ints(), int(inputs["target_tokens"].to_numpy()[-1])), [])
        unknown += not of_these
        for one, number in of_these:
            if number not in one.sent:  # one sent again stays as it was first
                one.take(number, _as_sent(datum, result["logprobs"].to_numpy()))
                break
    return unknown


def _as_sent(datum: Datum, train_logprobs: np.ndarray) -> Sent:
    inputs = {name: value.to_numpy().astype(np.float64) for name, value in datum.loss_fn_inputs.items()}
    weight = next((inputs[name] for name in ("weights", "loss_weights", "mask") if name in inputs), 1.0)
    logprobs = inputs.get("logprobs", np.zeros(datum.model_input.length))
    return Sent(logprobs, inputs["advantages"] * weight, train_logprobs.astype(np.float64))


def trained_of(scored_P: Sequence[Sequence[Scored]]) -> Trained:
    trained = Trained()
    for number, members in enumerate(scored_P):
        for member, one in enumerate(members):
            for datum, logprobs in one.datums():
                trained.data_D.append(datum)
                trained.metadata_D.append({"group_idx": number, "traj_idx": member})
                trained.logprobs_D.append(logprobs)
    return trained


def advantages_of(scored_P: Sequence[Sequence[Scored]]) -> dict[int, np.ndarray]:
    """Of each member, as sent, NaN if it was not; nothing for groups of which none was."""
    return {
        number: np.array([one.mean_advantage() for one in members])
        for number, members in enumerate(scored_P)
        if any(one.sent for one in members)
    }
