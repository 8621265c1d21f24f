"""A run directory for a loop of your own: with it `mint doctor`, the dashboard and the plots work there too.

    run = Recorder("runs/mine")
    trainer = run.watch(service.create_lora_training_client("mint/tiny"))
    for step in range(20):
        sampler = trainer.save_weights_and_get_sampling_client()
        answers = sampler.sample(prompt, 8, params).result()
        for sequence in answers.sequences:
            run.score(sequence, reward, response=text, reference="85")   # as you graded it
        trainer.forward_backward(datums, "importance_sampling")
        trainer.optim_step(adam)
        run.end_step()

What is written down is what went over the wire: the datums as they were sent, the sampling parameters as they were
asked for, the policy that really answered. So a loop that believes something else than it does is found out. The loop
tells only what the wire does not know: what an answer earned and, better with than without, the text that was graded
and the right answer.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

import mint
from mint.errors import BadRequest
from mint.rl.doctor import Finding, Watch
from mint.rl.ledger import Ledger
from mint.rl.metrics import compute_kl_sample_train
from mint.rl.rollout_log import TextOf, rollout_records
from mint.rl.rundir import RunDir
from mint.rl.sampler import SampledGroup
from mint.rl.step_metrics import group_metrics
from mint.rl.types import (
    Env,
    EnvGroupBuilder,
    Logs,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
    Transition,
    WrappedTrajectoryGroup,
)
from mint.rl.update import Trained
from mint.rl.watched import OptimCall, SampleCall, TrainCall, WatchedSampler, WatchedTrainer
from mint.types import Datum, ModelInput, SampledSequence, TensorData

SENT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
"""Sampling parameters whose means are logged every step as `sampling/<name>`."""


@dataclass
class _Scored:
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


@dataclass(frozen=True)
class _Problem(EnvGroupBuilder):
    name: str | None

    async def make_envs(self) -> Sequence[Env]:
        raise NotImplementedError("this run was recorded; its environments are in the loop that ran it.")

    def problem_id(self) -> str | None:
        return self.name


@dataclass
class _Step:
    """What happened since the last `end_step`."""

    scored: list[_Scored] = field(default_factory=list)
    trained: list[TrainCall] = field(default_factory=list)
    repeated: int = 0
    """Datums sent again before an optimizer step."""
    since_update: set[int] = field(default_factory=set)
    updates: list[OptimCall] = field(default_factory=list)


class Recorder:
    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        every: int = 5,
        overwrite: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """`config`: what you want to find in config.json. `every`: steps between looks of the doctor, whose new
        findings go to health.jsonl and to `say`; 0: never."""
        self.run_dir = RunDir(path)
        if self.run_dir.config() is not None:
            if not overwrite:
                raise BadRequest(f"{path} already holds a run; give another folder, or overwrite=True to replace it.")
            self.run_dir.clear()
        self.config: dict[str, Any] = {"recipe_name": "own loop", "rollout_json_export": True} | dict(config or {})
        self.run_dir.write_config(self.config)
        self.step = 0
        self.say = say
        self._watch = Watch(self.run_dir, self.config, every)
        self._ledger = Ledger(self.run_dir)
        self._text: TextOf | None = None
        self._lock = threading.Lock()
        self._calls: list[SampleCall] = []
        self._found: dict[int, tuple[SampleCall, SampledSequence]] = {}
        self._now = _Step()
        self._evaluated: list[_Scored] | None = None
        self._updates = 0
        self._updates_at = [0]
        """Optimizer steps taken before each step."""

    # ------------------------------------------------------------------------------------------------ what is watched

    @overload
    def watch(self, client: mint.TrainingClient) -> WatchedTrainer: ...
    @overload
    def watch(self, client: mint.SamplingClient) -> WatchedSampler: ...
    def watch(self, client: mint.TrainingClient | mint.SamplingClient) -> WatchedTrainer | WatchedSampler:
        """The client to use instead of this one. Sampling clients made from a watched training client are watched."""
        if self._text is None:
            self._text = TextOf(client.get_tokenizer())
        if isinstance(client, mint.SamplingClient):
            return WatchedSampler(client, self._note, self._updates)
        return WatchedTrainer(client, self._note)

    def _note(self, call: SampleCall | TrainCall | OptimCall) -> None:
        with self._lock:
            if isinstance(call, SampleCall):
                self._calls.append(call)
            elif isinstance(call, TrainCall):
                seen = {id(datum) for datum in call.data_D}
                self._now.repeated += len(seen & self._now.since_update)
                self._now.since_update |= seen
                self._now.trained.append(call)
            else:
                self._now.updates.append(call)
                self._now.since_update.clear()
                self._updates += 1

    # ------------------------------------------------------------------------------------------------ what is told

    def score(
        self,
        answer: SampledSequence | Sequence[SampledSequence],
        reward: float,
        *,
        response: str | None = None,
        reference: str | None = None,
        question: str | None = None,
        problem: str | None = None,
        group: object = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """What an answer earned; the turns of an episode as a list. `response`: the text that was graded, `reference`:
        the right answer, `question`: what was asked, `problem`: its lasting name, `metrics`: further measures (one
        with "correct" or "success" in its name is compared with the reward). Answers are compared within a group: the
        samples of one call or, where every call asks for one, those of equal first prompts, unless `group` says
        otherwise."""
        turns = [answer] if isinstance(answer, SampledSequence) else list(answer)
        with self._lock:
            self._collect()
            missing = [turn for turn in turns if id(turn) not in self._found]
            if missing or not turns:
                raise BadRequest(
                    f"{len(missing)} of {len(turns)} scored answers were not sampled through a watched client in this "
                    "step; sample with a client made from run.watch(training_client), and score before end_step."
                )
            found = [self._found[id(turn)] for turn in turns]
            first = found[0][0]
            if group is None:
                group = id(first) if first.num_samples > 1 else tuple(first.prompt)
            said = {"question": question, "response": response, "reference": reference}
            logs: Logs = {name: str(text) for name, text in said.items() if text is not None}
            scored = _Scored(found, group, float(reward), problem, dict(metrics or {}), logs)
            (self._now.scored if self._evaluated is None else self._evaluated).append(scored)

    @contextmanager
    def evaluation(self, name: str = "test") -> Iterator[None]:
        """What is sampled and scored inside is an evaluation of the newest policy, and not trained on. Repeat the
        seeds from one evaluation to the next: then what changed is the policy."""
        self._evaluated = []
        try:
            yield
        finally:
            scored, self._evaluated = self._evaluated, None
        version = self._version(self._updates)
        records = rollout_records(version, 1.0, self._sampled(_by_group(scored)), self._decoder())
        self.run_dir.write_rollouts(version, records, name)
        self._watch.add_evaluation(version, name, records)

    def end_step(self, metrics: Mapping[str, float] | None = None) -> list[Finding]:
        """Writes the step down, waiting for what was sent, and asks the doctor. Returns what is new."""
        with self._lock:
            self._collect()
            now, self._now = self._now, _Step()
            self._calls, self._found = [], {}
        outputs = [(call, call.future.result()) for call in now.trained]
        unknown = sum(self._match(now.scored, call, output) for call, output in outputs)
        if self.step == 0:
            self._complete_config(now)
        scored_P = _by_group(now.scored)
        groups, trained = self._sampled(scored_P), _trained(scored_P)
        logged = group_metrics(self.step, groups) | _sampling_metrics(now.scored) | _update_metrics(now)
        logged |= self._ledger.record(self.step, groups)
        logged |= compute_kl_sample_train(trained.data_D, trained.logprobs_D)
        logged |= {"train/unknown_datums": float(unknown), "training_client/step": self.step + 1.0} | dict(
            metrics or {}
        )
        temperature = logged.get("sampling/temperature", 1.0)
        records = rollout_records(self.step, temperature, groups, self._decoder(), _advantages(scored_P), trained)
        self.run_dir.write_rollouts(self.step, records)
        self.run_dir.append_metrics(self.step, logged)
        self._watch.add_step(self.step, logged, records)
        findings = self._watch.look_if_due(self.step)
        self.step += 1
        self._updates_at.append(self._updates)
        for finding in findings:
            self.say("\n".join(finding.lines()))
        return findings

    # ----------------------------------------------------------------------------------------------------------------

    def _decoder(self) -> TextOf:
        if self._text is None:
            raise BadRequest("nothing was watched: make the clients with run.watch(training_client).")
        return self._text

    def _collect(self) -> None:
        """Answers that have come, by identity: a user's sequence is the very object the future holds."""
        done = [call for call in self._calls if call.future.done()]
        self._calls = [call for call in self._calls if not call.future.done()]
        for call in done:
            if not call.future.cancelled() and call.future.exception() is None:
                self._found |= {id(sequence): (call, sequence) for sequence in call.future.result().sequences}

    def _version(self, updates: int) -> int:
        """The last step before which so many optimizer steps had been taken: a step without one makes no new policy."""
        known = [*self._updates_at, self._updates] if self._updates > self._updates_at[-1] else self._updates_at
        return max(step for step, taken in enumerate(known) if taken <= updates)

    def _sampled(self, scored_P: Sequence[Sequence[_Scored]]) -> list[SampledGroup]:
        groups = []
        for number, members in enumerate(scored_P):
            group = TrajectoryGroup([_trajectory(m) for m in members], [0.0] * len(members), [{} for _ in members])
            version = min(self._version(call.updates) for m in members for call, _ in m.turns)
            wrapped = WrappedTrajectoryGroup(group, _Problem(members[0].problem), version)
            groups.append(SampledGroup(number, (self.step, number), wrapped))
        return groups

    def _match(self, scored: Sequence[_Scored], call: TrainCall, output: Any) -> int:
        """Gives every datum to the rollout it was made from; how many belong to none."""
        owners: dict[tuple[int, ...], list[_Scored]] = defaultdict(list)
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

    def _complete_config(self, now: _Step) -> None:
        """What the first step shows of how the loop is set up; what the user said of it counts."""
        seen: dict[str, Any] = {}
        for call in now.trained[:1]:
            seen["loss_fn"] = call.loss_fn
        for update in now.updates[:1]:
            seen["learning_rate"] = update.params.learning_rate
        for scored in now.scored[:1]:
            params = scored.turns[0][0].params
            seen |= {"temperature": params.temperature, "max_tokens": params.max_tokens}
        self.config |= {name: value for name, value in seen.items() if name not in self.config}
        self._watch.config = self.config
        self.run_dir.write_config(self.config)


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


def _trajectory(scored: _Scored) -> Trajectory:
    """With the log-probs as they were sent, where they were: those are what enters the ratio."""
    sent = None if scored.sent is None else scored.sent.loss_fn_inputs["logprobs"].to_numpy()
    transitions = []
    for turn, (call, sequence) in enumerate(scored.turns):
        last = turn == len(scored.turns) - 1
        logprobs = sequence.logprobs
        if sent is not None and scored.tokens[: len(call.prompt)] == call.prompt:
            logprobs = sent[len(call.prompt) - 1 :][: len(sequence.tokens)].tolist()
        action = TokensWithLogprobs(sequence.tokens, logprobs, sequence.stop_reason)
        reward = scored.reward if last else 0.0
        metrics, logs = (dict(scored.metrics), dict(scored.logs)) if last else ({}, {})
        transitions.append(Transition(ModelInput.from_ints(call.prompt), action, reward, last, metrics, logs))
    ended = StopReason.MAX_TOKENS if scored.turns[-1][1].stop_reason == "length" else StopReason.COMPLETED
    return Trajectory(transitions, None, ended)


def _by_group(scored: Sequence[_Scored]) -> list[list[_Scored]]:
    groups: dict[object, list[_Scored]] = defaultdict(list)
    for one in scored:
        groups[one.group].append(one)
    return list(groups.values())


def _trained(scored_P: Sequence[Sequence[_Scored]]) -> Trained:
    trained = Trained()
    for number, members in enumerate(scored_P):
        for member, one in enumerate(members):
            if one.sent is not None and one.train_logprobs is not None:
                trained.data_D.append(one.sent)
                trained.metadata_D.append({"group_idx": number, "traj_idx": member})
                trained.logprobs_D.append(one.train_logprobs)
    return trained


def _advantages(scored_P: Sequence[Sequence[_Scored]]) -> dict[int, np.ndarray]:
    """Of each member, as sent, NaN if it was not; nothing for groups of which none was."""
    return {
        number: np.array([_mean_sent(one.sent) for one in members])
        for number, members in enumerate(scored_P)
        if any(one.sent is not None for one in members)
    }


def _mean_sent(sent: Datum | None) -> float:
    """Over the sampled tokens."""
    if sent is None:
        return float("nan")
    mask = sent.loss_fn_inputs["mask"].to_numpy() > 0
    return float(sent.loss_fn_inputs["advantages"].to_numpy()[mask].mean())


def _sampling_metrics(scored: Sequence[_Scored]) -> dict[str, float]:
    params = [call.params for one in scored for call, _ in one.turns]
    metrics = {}
    for name in SENT_SAMPLING:
        values = [float(value) for p in params if (value := getattr(p, name)) is not None]
        if values:
            metrics[f"sampling/{name}"] = float(np.mean(values))
    return metrics


def _update_metrics(now: _Step) -> dict[str, float]:
    """What the optimizer said of its last step, and how much was sent."""
    metrics = {
        "train/datums": float(sum(len(call.data_D) for call in now.trained)),
        "train/datums_repeated": float(now.repeated),
        "train/optim_steps": float(len(now.updates)),
        "train/skipped": 0.0 if now.updates else 1.0,
    }
    if now.updates:
        metrics |= now.updates[-1].future.result().metrics or {}
        metrics["optim/lr"] = now.updates[-1].params.learning_rate
    return metrics
