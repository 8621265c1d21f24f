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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import mint
from mint.errors import BadRequest
from mint.rl.doctor import Finding, Watch
from mint.rl.ledger import Ledger
from mint.rl.metrics import compute_kl_sample_train
from mint.rl.rollout_log import TextOf, rollout_records
from mint.rl.rundir import RunDir
from mint.rl.sampler import SampledGroup
from mint.rl.scored import Scored, Turn, advantages_of, by_group, give_datums, trained_of
from mint.rl.sent_step import SentStep
from mint.rl.step_metrics import group_metrics
from mint.rl.types import (
    Env,
    EnvGroupBuilder,
    Logs,
    TrajectoryGroup,
    WrappedTrajectoryGroup,
)
from mint.rl.watched import OptimCall, SampleCall, TrainCall, WatchedSampler, WatchedTrainer
from mint.types import SampledSequence


@dataclass(frozen=True)
class _Problem(EnvGroupBuilder):
    name: str | None

    async def make_envs(self) -> Sequence[Env]:
        raise NotImplementedError("this run was recorded; its environments are in the loop that ran it.")

    def problem_id(self) -> str | None:
        return self.name


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
        self._found: dict[int, Turn] = {}
        self._now = SentStep()
        self._evaluated: list[Scored] | None = None
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
            else:
                self._now.note(call)
                self._updates += isinstance(call, OptimCall)

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
            first = found[0].call
            if group is None:
                group = id(first) if first.num_samples > 1 else tuple(first.prompt)
            said = {"question": question, "response": response, "reference": reference}
            logs: Logs = {name: str(text) for name, text in said.items() if text is not None}
            scored = Scored(found, group, float(reward), problem, dict(metrics or {}), logs)
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
        records = rollout_records(version, 1.0, self._sampled(by_group(scored)), self._decoder())
        self.run_dir.write_rollouts(version, records, name)
        self._watch.add_evaluation(version, name, records)

    def end_step(self, metrics: Mapping[str, float] | None = None) -> list[Finding]:
        """Writes the step down, waiting for what was sent, and asks the doctor. Returns what is new."""
        with self._lock:
            self._collect()
            now, self._now = self._now, SentStep()
            self._calls, self._found = [], {}
        outputs = [(call, call.future.result()) for call in now.trained]
        unknown = sum(give_datums(now.scored, call, output) for call, output in outputs)
        if self.step == 0:
            self._complete_config(now)
        scored_P = by_group(now.scored)
        groups, trained = self._sampled(scored_P), trained_of(scored_P)
        logged = group_metrics(self.step, groups) | now.sampling_metrics() | now.update_metrics()
        logged |= self._ledger.record(self.step, groups)
        logged |= compute_kl_sample_train(trained.data_D, trained.logprobs_D)
        logged |= {"train/unknown_datums": float(unknown), "training_client/step": self.step + 1.0}
        logged |= dict(metrics or {})
        temperature = logged.get("sampling/temperature", 1.0)
        records = rollout_records(self.step, temperature, groups, self._decoder(), advantages_of(scored_P), trained)
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
                self._found |= {id(sequence): Turn(call, sequence) for sequence in call.future.result().sequences}

    def _version(self, updates: int) -> int:
        """The last step before which so many optimizer steps had been taken: a step without one makes no new policy."""
        known = [*self._updates_at, self._updates] if self._updates > self._updates_at[-1] else self._updates_at
        return max(step for step, taken in enumerate(known) if taken <= updates)

    def _sampled(self, scored_P: Sequence[Sequence[Scored]]) -> list[SampledGroup]:
        groups = []
        for number, members in enumerate(scored_P):
            group = TrajectoryGroup([m.trajectory() for m in members], [0.0] * len(members), [{} for _ in members])
            version = min(self._version(turn.call.updates) for m in members for turn in m.turns)
            wrapped = WrappedTrajectoryGroup(group, _Problem(members[0].problem), version)
            groups.append(SampledGroup(number, (self.step, number), wrapped))
        return groups

    def _complete_config(self, now: SentStep) -> None:
        """What the first step shows of how the loop is set up; what the user said of it counts."""
        self.config = now.settings() | self.config
        self._watch.config = self.config
        self.run_dir.write_config(self.config)
