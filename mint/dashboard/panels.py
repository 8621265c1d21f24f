"""Which curves a run's page shows, in which order, under which name, and what each means in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mint.dashboard.charts import Line, Mark, Options, line_chart, stacked
from mint.dashboard.data import Run, Series
from mint.dashboard.theme import NOTHING, PALETTE, duration, number, percent
from mint.rl.rundir import HOLDOUT, REWARD

SUCCESS = ("env/all/reward/success", "env/all/correct", "env/all/right")
HOLDOUT_SUCCESS = tuple(f"test/{name}" for name in SUCCESS)
SPANS = ("sample", "prepare", "train", "refresh", "evaluate")


@dataclass(frozen=True)
class Curve:
    name: str
    metrics: tuple[str, ...]
    """The first of these the run has."""
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    why: str
    curves: tuple[Curve, ...]
    low: float | None = None
    high: float | None = None
    share: bool = False
    """Read as per cent."""

    def lines(self, run: Run) -> list[Line]:
        found = [(curve, run.series(*curve.metrics)) for curve in self.curves]
        return [
            Line(curve.name, series, PALETTE[i], curve.dots) for i, (curve, series) in enumerate(found) if len(series)
        ]

    def now(self, run: Run) -> str:
        value = run.last(*self.curves[0].metrics)
        return (percent if self.share else number)(value)

    def options(self, run: Run, smoothing: float, marks: Sequence[Mark]) -> Options:
        return line_chart(self.lines(run), smoothing, marks, self.low, self.high, share=self.share)


def one(name: str, *metrics: str) -> tuple[Curve, ...]:
    return (Curve(name, metrics),)


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Learning",
        (
            Panel(
                "Reward",
                "Mean reward of all samples of a step, and of the held-out problems, which are never trained on.",
                (Curve("train", REWARD), Curve("held out", HOLDOUT, dots=True)),
            ),
            Panel(
                "Success rate",
                "Share of samples that count as right: a reward of at least one half, or what the environment calls "
                "correct.",
                (Curve("train", SUCCESS), Curve("held out", HOLDOUT_SUCCESS, dots=True)),
                low=0,
                high=1,
                share=True,
            ),
            Panel(
                "Groups with signal",
                "Share of prompts whose samples earned different rewards. Only these teach anything: where all are "
                "right or all are wrong, every advantage is zero.",
                (
                    Curve("mixed", ("env/all/by_group/frac_mixed",)),
                    Curve("all good", ("env/all/by_group/frac_all_good",)),
                    Curve("all bad", ("env/all/by_group/frac_all_bad",)),
                ),
                low=0,
                high=1,
                share=True,
            ),
        ),
    ),
    (
        "Policy",
        (
            Panel(
                "KL to the reference",
                "How far the policy has moved from the reference, in nats a token (mean of log p − log q over sampled "
                "tokens).",
                one("KL", "kl_policy_base"),
            ),
            Panel(
                "Entropy",
                "Minus the mean log-prob of sampled tokens, in nats. Near zero the policy says the same thing every "
                "time and stops exploring.",
                one("entropy", "optim/entropy", "train/entropy_sampled:mean"),
                low=0,
            ),
            Panel(
                "Ratio of trainer to sampler",
                "Probability of a sampled token under the trainer divided by that under the sampler. On fresh samples "
                "it is 1; far from it, the two disagree or the samples are old.",
                (
                    Curve("mean", ("train/ratio:mean",)),
                    Curve("max", ("train/ratio:max",)),
                    Curve("min", ("train/ratio:min",)),
                ),
            ),
            Panel(
                "Size of the update",
                "Norm of the gradient before clipping.",
                one("gradient norm", "optim/grad_norm"),
                low=0,
            ),
        ),
    ),
    (
        "Text",
        (
            Panel(
                "Tokens a turn",
                "Mean number of tokens the model writes in a turn.",
                (
                    Curve("train", ("env/all/ac_tokens_per_turn",)),
                    Curve("held out", ("test/env/all/ac_tokens_per_turn",), dots=True),
                ),
                low=0,
            ),
            Panel(
                "Truncated",
                "Share of samples cut off by a token limit. They are usually graded as wrong whatever they were about "
                "to say.",
                one("truncated", "env/all/truncated"),
                low=0,
                high=1,
                share=True,
            ),
            Panel(
                "Repeated answers",
                "Share of samples that another sample of the same group had given already, to the letter.",
                one("duplicates", "env/all/duplicates"),
                low=0,
                high=1,
                share=True,
            ),
            Panel(
                "Turns and tool calls",
                "Mean number of turns, and of tool calls, in an episode.",
                (Curve("turns", ("env/all/turns_per_episode",)), Curve("tool calls", ("env/all/episode/tool_calls",))),
                low=0,
            ),
        ),
    ),
    (
        "Schedule",
        (
            Panel("Learning rate", "Step size of the optimizer.", one("learning rate", "optim/lr"), low=0),
            Panel(
                "Temperature",
                "Of sampling: higher is more varied.",
                one("temperature", "sampling/temperature"),
            ),
            Panel(
                "Lag of the sampler",
                "By how many updates the weights that sampled were behind those trained; 0 is on-policy.",
                (Curve("mean", ("sampling/lag_mean",)), Curve("max", ("sampling/lag_max",))),
                low=0,
            ),
        ),
    ),
)


def per_second(run: Run, *tokens: str) -> Series:
    """Tokens of a step divided by its seconds."""
    counted, seconds = run.series(*tokens), run.series("time/total")
    by_step = dict(zip(seconds.steps, seconds.values, strict=True))
    points = [(s, v / by_step[s]) for s, v in zip(counted.steps, counted.values, strict=True) if by_step.get(s)]
    return Series([s for s, _ in points], [v for _, v in points])


def speed(run: Run, smoothing: float, marks: Sequence[Mark]) -> Options:
    sampled, trained = per_second(run, "env/all/total_ac_tokens"), per_second(run, "train/tokens")
    lines = [Line("sampled", sampled, PALETTE[0]), Line("trained on", trained, PALETTE[1])]
    return line_chart([line for line in lines if len(line.series)], smoothing, marks, low=0)


def spans(run: Run, smoothing: float, marks: Sequence[Mark]) -> Options:
    parts = [(name, run.series(f"time/{name}:total")) for name in SPANS]
    return stacked([part for part in parts if len(part[1])])


def last_speed(run: Run) -> str:
    values = per_second(run, "env/all/total_ac_tokens").values
    return number(round(values[-1])) if values else NOTHING


def last_seconds(run: Run) -> str:
    return duration(run.last("time/total"))


Drawing = Callable[[Run, float, Sequence[Mark]], Options]
Now = Callable[[Run], str]
SPEED: tuple[tuple[str, str, Drawing, Now], ...] = (
    ("Tokens a second", "Tokens of a step divided by the seconds the whole step took.", speed, last_speed),
    (
        "Where the time goes",
        "Seconds of a step by what the loop waited for. With lag, sampling goes on beside training and is waited for "
        "less.",
        spans,
        last_seconds,
    ),
)
