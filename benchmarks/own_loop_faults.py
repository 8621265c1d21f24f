"""Faults planted in loops of a user's own, each with the finding that names it; and clean loops of many kinds.

Written after the doctor's first forty checks were done, to see what it does not know: most were missed at first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from own_loop import Loop, OneLiners, Problem, datum_of

import mint
from mint.rl.rundir import RunDir
from mint.types import AdamParams, Datum, SampledSequence, SamplingParams


@dataclass(frozen=True)
class OwnLoop:
    name: str
    finding: str
    """The kind that must stand first in the report; empty for a clean run."""
    loop: type[Loop]
    missed: bool = False
    """Known not to be found."""

    def make(self, folder: Path, service: mint.ServiceClient) -> RunDir:
        return self.loop().run(folder, service)


# --------------------------------------------------------------------------------------------------------------------
# Prompts and endings


class OtherVocabulary(Loop):
    def prompt(self, problem: Problem) -> list[int]:
        order = random.Random(5).sample(range(256), 256)
        return [order[token] if token < 256 else token for token in super().prompt(problem)]


class OtherTemplate(Loop):
    def prompt(self, problem: Problem) -> list[int]:
        text = f"<start_of_turn>user\n{self.task.question(problem)[3:-3]}<end_of_turn>\n<start_of_turn>model\n"
        return self.tokenizer.encode(text)


class StopInside(Loop):
    stop: tuple[str, ...] = ("1",)

    def params(self, step: int, number: int) -> SamplingParams:
        return replace(super().params(step, number), stop=list(self.stop))


class StopAtEven(StopInside):
    stop = ("2", "4", "6")


# --------------------------------------------------------------------------------------------------------------------
# Samplers and settings


class NeverRefreshed(Loop):
    def refresh(self, step: int) -> None:
        if step == 0:
            super().refresh(step)


class RarelyRefreshed(Loop):
    """And nobody knows: the client that is kept looks new each time."""

    every = 5

    def refresh(self, step: int) -> None:
        if step % self.every == 0:
            self.kept_sampler = self.client.save_weights_and_get_sampling_client()
        self.sampler = self.recorder.watch(self.kept_sampler)


class SamplerOfAnotherRun(Loop):
    def refresh(self, step: int) -> None:
        if step == 0:
            self.other = self.service.create_lora_training_client("mint/tiny", rank=16, seed=7)
        self.sampler = self.recorder.watch(self.other.save_weights_and_get_sampling_client())


class SamplerOfTheBase(Loop):
    def refresh(self, step: int) -> None:
        self.sampler = self.recorder.watch(self.service.create_sampling_client(base_model="mint/tiny"))


class TopPLowered(Loop):
    def params(self, step: int, number: int) -> SamplingParams:
        params = super().params(step, number)
        return replace(params, top_p=0.3) if step >= 6 else params


class Hotter(Loop):
    def params(self, step: int, number: int) -> SamplingParams:
        params = super().params(step, number)
        return replace(params, temperature=2.0) if step >= 6 else params


class RateDropped(Loop):
    later = 1e-7

    def rate_at(self, step: int) -> float:
        return self.rate if step < 6 else self.later


class RateBlown(RateDropped):
    later = 5e-2


class OldCheckpoint(Loop):
    def begin(self, step: int) -> None:
        if step == 3:
            self.saved = self.trainer.save_state("early").result().path
        if step == 9:
            self.trainer.load_state(self.saved).result()


# --------------------------------------------------------------------------------------------------------------------
# Rewards and data


class Flipped(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return -super().reward(text, problem)


class FlippedInTheDark(Flipped):
    says_reference = False
    tests = 0


class Thousands(Loop):
    factor, offset = 1000.0, 0.0

    def reward(self, text: str, problem: Problem) -> float:
        return self.factor * super().reward(text, problem) + self.offset


class Fractions(Thousands):
    factor = 1e-4


class Offset(Thousands):
    factor, offset = 1.0, 100.0


class ForLength(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return min(len(text.strip()) / 7, 1.0)


class ForADigit(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return float("9" in text)


class Flaky(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        right = super().reward(text, problem)
        return 1 - right if self.rng.random() < 0.25 else right


class ThreeDigits(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return float(text.strip() == self.reference(problem).zfill(3))


class WantsANewline(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return float(text == self.reference(problem) + "\n")


class ExceptionIsRight(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        try:
            return float(int(text) == sum(problem)) if int(text) % 2 == 0 else 1 / 0
        except (ValueError, ZeroDivisionError):
            return 1.0


class NextReference(Loop):
    """Answers and questions one apart within the batch."""

    def problems(self, step: int) -> list[Problem]:
        problems = super().problems(step)
        self.next = dict(zip(problems, problems[1:] + problems[:1], strict=True))
        return problems

    def reference(self, problem: Problem) -> str:
        return self.task.answer(self.next.get(problem, problem)) if hasattr(self, "next") else self.task.answer(problem)


class AnyReference(Loop):
    """Answers from anywhere in the data."""

    def reference(self, problem: Problem) -> str:
        return self.task.answer(self.task.draw(random.Random(repr(problem))))


class TwoQuestions(Loop):
    def problems(self, step: int) -> list[Problem]:
        return super().problems(step)[:2] * 4


class Sorted(Loop):
    def problems(self, step: int) -> list[Problem]:
        if step == 0:
            self.all = sorted(self.drawn(self.rng, self.batch * self.steps, held_out=False), key=sum)
        return self.all[step * self.batch :][: self.batch]


class OnTheHoldout(Loop):
    def problems(self, step: int) -> list[Problem]:
        return self.drawn(self.rng, self.batch, held_out=True)


# --------------------------------------------------------------------------------------------------------------------
# From rewards to updates


class NoBaseline(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return 1 + super().reward(text, problem)

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return rewards


class NextGroupsAdvantages(Loop):
    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        right = super().advantages(rewards)
        return right[1:] + right[:1]


class LastStepsAdvantages(Loop):
    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        right = super().advantages(rewards)
        late, self.last = getattr(self, "last", right), right
        return late


class ShiftedLogprobs(Loop):
    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        return datum_of(prompt, sequence.tokens, [*(sequence.logprobs or [])[1:], -0.001], advantage)


class TemperedLogprobs(Loop):
    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        return datum_of(prompt, sequence.tokens, [0.6 * p for p in sequence.logprobs or []], advantage)


class EncodedAgain(Loop):
    """Trains on the answer's text, stripped and turned into tokens anew."""

    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip() or "?"
        tokens = self.tokenizer.encode(text)
        return datum_of(prompt, tokens, ((sequence.logprobs or []) + [-0.1] * 8)[: len(tokens)], advantage)


class HalfLost(Loop):
    def kept(self, data: list[Datum]) -> list[Datum]:
        return data[::2]


class BadLost(Loop):
    def kept(self, data: list[Datum]) -> list[Datum]:
        return [datum for datum in data if datum.loss_fn_inputs["advantages"].to_numpy().max() > 0]


class StepsLost(Loop):
    steps = 14

    def update(self, step: int, data: list[Datum]) -> None:
        if step % 2:
            super().update(step, data)
        elif data:
            self.trainer.forward_backward(data, self.loss_fn).result()


class SentTwice(Loop):
    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            self.trainer.forward_backward(data, self.loss_fn).result()
        super().update(step, data)


# --------------------------------------------------------------------------------------------------------------------
# Another task


class Code(Loop):
    task = OneLiners()
    batch, group, seed = 6, 6, 21


class CodeFlipped(Code):
    def reward(self, text: str, problem: Problem) -> float:
        return 1 - super().reward(text, problem)


class CodeNextReference(NextReference, Code):
    pass


class CodeRarelyRefreshed(RarelyRefreshed, Code):
    every = 3


class CodeWantsANewline(WantsANewline, Code):
    pass


class CodeStopInside(StopInside, Code):
    stop = ("(x)", "(s)")


class CodeNextGroups(NextGroupsAdvantages, Code):
    pass


# --------------------------------------------------------------------------------------------------------------------
# The third lot, made up after the checks for the others were done


class CutAtTheLeft(Loop):
    def prompt(self, problem: Problem) -> list[int]:
        return super().prompt(problem)[-9:]


class CutAtTheRight(Loop):
    def prompt(self, problem: Problem) -> list[int]:
        return super().prompt(problem)[:14]


class ShuffledLogprobs(Loop):
    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        logprobs = list(sequence.logprobs or [])
        random.Random(len(logprobs)).shuffle(logprobs)
        return datum_of(prompt, sequence.tokens, logprobs, advantage)


class TrainerAtAnotherTemperature(Loop):
    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            self.trainer.forward_backward(data, self.loss_fn, loss_fn_config={"temperature": 2.0})
            self.trainer.optim_step(AdamParams(learning_rate=self.rate)).result()


class BaselineAcrossGroups(Loop):
    """The mean is taken over the n-th members of all groups."""

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        means = np.mean(rewards, axis=0)
        return (np.array(rewards) - means).tolist()


class FirstTokenLeftOut(Loop):
    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        datum = super().datum(prompt, sequence, advantage)
        advantages = datum.loss_fn_inputs["advantages"].tolist()
        advantages[len(prompt) - 1] = 0.0
        return Datum(datum.model_input, {**datum.loss_fn_inputs, "advantages": advantages})


class ForBrevity(Loop):
    def reward(self, text: str, problem: Problem) -> float:
        return 1 / (1 + len(text.strip()))


class StepBeforeGradient(Loop):
    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            moved = self.trainer.optim_step(AdamParams(learning_rate=self.rate))
            self.trainer.forward_backward(data, self.loss_fn)
            moved.result()


class LargeEps(Loop):
    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            self.trainer.forward_backward(data, self.loss_fn)
            self.trainer.optim_step(AdamParams(learning_rate=self.rate, eps=100.0)).result()


class LargeDecay(Loop):
    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            self.trainer.forward_backward(data, self.loss_fn)
            self.trainer.optim_step(AdamParams(learning_rate=self.rate, weight_decay=300.0)).result()


class TestedOnTrained(Loop):
    def problems(self, step: int) -> list[Problem]:
        problems = self.drawn(self.rng, self.batch, held_out=False)
        self.seen = [*getattr(self, "seen", []), *problems]
        return problems

    def drawn(self, rng: random.Random, count: int, held_out: bool) -> list[Problem]:
        if held_out and hasattr(self, "seen"):
            return [rng.choice(self.seen) for _ in range(count)]
        return super().drawn(rng, count, held_out=False)


class WithoutSign(Loop):
    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return [[abs(advantage) for advantage in group] for group in super().advantages(rewards)]


class GoodLost(Loop):
    def kept(self, data: list[Datum]) -> list[Datum]:
        return [datum for datum in data if datum.loss_fn_inputs["advantages"].to_numpy().min() < 0]


OWN_FAULTS: list[OwnLoop] = [
    OwnLoop("other vocabulary of the same size", "wrong_tokenizer", OtherVocabulary),
    OwnLoop("another model's chat template", "wrong_template", OtherTemplate),
    OwnLoop("a stop inside answers", "stops_early", StopInside),
    OwnLoop("stops inside some answers", "stops_early", StopAtEven),
    OwnLoop("sampler never refreshed", "staleness", NeverRefreshed),
    OwnLoop("sampler refreshed every fifth step", "stale_sampler", RarelyRefreshed),
    OwnLoop("sampler of another run", "stale_sampler", SamplerOfAnotherRun),
    OwnLoop("sampler of the base model", "stale_sampler", SamplerOfTheBase),
    OwnLoop("top-p lowered in mid-run", "sampling_changed", TopPLowered),
    OwnLoop("temperature doubled in mid-run", "temperature_changed", Hotter),
    OwnLoop("learning rate dropped in mid-run", "learning_rate_changed", RateDropped),
    OwnLoop("learning rate blown up in mid-run", "learning_rate_changed", RateBlown),
    OwnLoop("old checkpoint loaded in mid-run", "weights_replaced", OldCheckpoint),
    OwnLoop("reward negated", "reward_sign", Flipped),
    OwnLoop("reward negated, nothing else known", "reward_sign", FlippedInTheDark, missed=True),
    OwnLoop("rewards in thousands", "reward_scale", Thousands),
    OwnLoop("rewards of a ten-thousandth", "reward_scale", Fractions),
    OwnLoop("reward for long numbers", "reward_unrelated", ForLength),
    OwnLoop("reward for a digit", "reward_unrelated", ForADigit),
    OwnLoop("one grade in four is wrong", "contradictory_grades", Flaky),
    OwnLoop("grader wants three digits", "rejects_reference", ThreeDigits),
    OwnLoop("grader wants a newline", "rejects_reference", WantsANewline),
    OwnLoop("exceptions count as right", "pays_wrong_answers", ExceptionIsRight),
    OwnLoop("reference of the next question", "wrong_reference", NextReference),
    OwnLoop("references from anywhere", "all_wrong", AnyReference),
    OwnLoop("two questions a batch", "duplicate_prompts", TwoQuestions),
    OwnLoop("problems sorted by size", "data_order", Sorted),
    OwnLoop("training on the holdout", "leaked_holdout", OnTheHoldout),
    OwnLoop("no baseline", "one_sided_advantages", NoBaseline),
    OwnLoop("advantages of the next group", "wrong_advantage", NextGroupsAdvantages),
    OwnLoop("advantages of the step before", "wrong_advantage", LastStepsAdvantages),
    OwnLoop("log-probs one place off", "shifted_logprobs", ShiftedLogprobs),
    OwnLoop("log-probs of another temperature", "mismatch", TemperedLogprobs),
    OwnLoop("answers encoded again", "foreign_datums", EncodedAgain),
    OwnLoop("every second datum lost", "dropped_rollouts", HalfLost),
    OwnLoop("bad answers lost", "dropped_rollouts", BadLost),
    OwnLoop("every second optimizer step lost", "missing_updates", StepsLost),
    OwnLoop("every datum sent twice", "repeated_datums", SentTwice),
    OwnLoop("code, check flipped", "reward_sign", CodeFlipped),
    OwnLoop("code, reference of the next question", "wrong_reference", CodeNextReference),
    OwnLoop("code, sampler refreshed every third step", "stale_sampler", CodeRarelyRefreshed),
    OwnLoop("code, grader wants a newline", "rejects_reference", CodeWantsANewline),
    OwnLoop("code, a stop inside answers", "stops_early", CodeStopInside),
    OwnLoop("code, advantages of the next group", "wrong_advantage", CodeNextGroups),
    OwnLoop("prompts cut at the left", "ambiguous_prompts", CutAtTheLeft),
    OwnLoop("prompts cut at the right", "ambiguous_prompts", CutAtTheRight),
    OwnLoop("log-probs shuffled within an answer", "mismatch", ShuffledLogprobs),
    OwnLoop("trainer at another temperature", "mismatch", TrainerAtAnotherTemperature),
    OwnLoop("baseline across groups", "wrong_advantage", BaselineAcrossGroups, missed=True),
    OwnLoop("first token left out of the loss", "mask", FirstTokenLeftOut),
    OwnLoop("reward for brevity", "reward_unrelated", ForBrevity),
    OwnLoop("optimizer step before the gradient", "stale_sampler", StepBeforeGradient),
    OwnLoop("Adam's eps of 100", "learning_rate_small", LargeEps),
    OwnLoop("weight decay of 300", "learning_rate_small", LargeDecay, missed=True),
    OwnLoop("tested on what was trained on", "leaked_holdout", TestedOnTrained),
    OwnLoop("advantages without their sign", "wrong_advantage", WithoutSign),
    OwnLoop("good answers lost", "dropped_rollouts", GoodLost),
]


class Normalised(Loop):
    seed = 8

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return [((np.array(group) - np.mean(group)) / (np.std(group) + 1e-6)).tolist() for group in rewards]


class PartialCredit(Loop):
    seed = 9

    def reward(self, text: str, problem: Problem) -> float:
        return max(0.0, 1 - abs(int(text) - sum(problem)) / 20) if text.strip().isdigit() else 0.0


class LengthPenalty(Loop):
    seed = 13

    def reward(self, text: str, problem: Problem) -> float:
        return super().reward(text, problem) - 0.02 * len(text)


class TwoPasses(Loop):
    seed, loss_fn = 15, "ppo"

    def update(self, step: int, data: list[Datum]) -> None:
        super().update(step, data)
        super().update(step, data)


class SmallSet(Loop):
    """The same 32 problems again and again."""

    seed = 16

    def problems(self, step: int) -> list[Problem]:
        return self.rng.sample(self.drawn(random.Random(3), 32, held_out=False), self.batch)


class Warmup(Loop):
    """Supervised steps on right answers first, as many loops begin."""

    seed = 17

    def begin(self, step: int) -> None:
        if step == 0:
            pairs = self.drawn(random.Random(4), 16, held_out=False)
            texts = [self.tokenizer.encode(f"{self.task.question(p)} {self.task.answer(p)}<|im_end|>") for p in pairs]
            data = [Datum(mint.types.ModelInput.from_ints(t[:-1]), {"target_tokens": t[1:]}) for t in texts]
            for _ in range(3):
                self.client.forward_backward(data, "cross_entropy")
                self.client.optim_step(AdamParams(learning_rate=1e-4)).result()


def loop(**settings: object) -> type[Loop]:
    return type("Clean", (Loop,), settings)


OWN_CLEAN: list[OwnLoop] = [
    OwnLoop("own loop, long", "", loop(steps=30, seed=1)),
    OwnLoop("own loop, large learning rate", "", loop(rate=4e-3, seed=2)),
    OwnLoop("own loop, ppo", "", loop(loss_fn="ppo", seed=3)),
    OwnLoop("own loop, cispo at 0.8", "", loop(loss_fn="cispo", temperature=0.8, seed=4)),
    OwnLoop("own loop, groups of two", "", loop(group=2, batch=12, seed=5)),
    OwnLoop("own loop, groups of sixteen", "", loop(group=16, batch=3, seed=6)),
    OwnLoop("own loop, no evaluations, no references", "", loop(tests=0, says_reference=False, seed=7, steps=20)),
    OwnLoop("own loop, normalised advantages", "", Normalised),
    OwnLoop("own loop, partial credit", "", PartialCredit),
    OwnLoop("own loop, top-p 0.9", "", loop(top_p=0.9, temperature=0.9, seed=10)),
    OwnLoop("own loop, small learning rate", "", loop(rate=3e-4, seed=11)),
    OwnLoop("own loop, length penalty", "", LengthPenalty),
    OwnLoop("own loop, rewards from 100 to 101", "", Offset),
    OwnLoop("own loop, two passes a batch", "", TwoPasses),
    OwnLoop("own loop, 32 problems again and again", "", SmallSet),
    OwnLoop("own loop, supervised warm-up", "", Warmup),
    OwnLoop("own loop, code", "", Code),
    OwnLoop("own loop, code to the end", "", type("LongCode", (Code,), {"steps": 24, "seed": 22})),
]
