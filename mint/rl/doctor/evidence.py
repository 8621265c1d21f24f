"""A run reduced to what the checks ask: a few numbers a rollout, a few lines a step, never the token lists.

So the loop can keep a window of it in memory, and a report on a long run reads each rollouts file once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mint.rl.hashing import stable_hash
from mint.rl.rundir import Json, RolloutRecord, RunDir

SHOWN_CHARACTERS = 160
PIECE_HASH = np.array([1, 1_000_003, 998_244_353, 6_700_417], dtype=np.int64)
"""Four tokens as one number, the same only for the same four as far as counting goes."""
LOGPROBS_KEPT = 32
"""Of the first tokens of an evaluation's answers, to see whether the policy moved."""
CUT_OFF = frozenset({"max_tokens", "max_sampled_tokens", "context_overflow"})
END_TOKEN = re.compile(
    r"<\|?(/s|eos|end|eot|eot_id|eom_id|im_end|endoftext|end_of_text|end_of_turn|end_of_sentence)\|?>|\[(EOS|SEP)\]"
)
SPECIAL = re.compile(r"<\|[^|<>]*\|>|</?s>|<(eos|bos|pad)>")
NOT_TEXT = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff]")
END = "<end>"
EVALUATION = "test"
"""The loop's own evaluator; further ones measure other things."""


@dataclass(frozen=True)
class Sample:
    """One rollout."""

    step: int
    group: int
    member: int
    problem: str
    prompt: str
    completion: str
    reference: str | None
    """The right answer, where the environment logs it."""
    prompt_key: int
    """Of the prompt's text without regard to case and spaces."""
    completion_key: int
    reward: float
    terms: Mapping[str, float]
    advantage: float | None
    sent: float | None
    """Mean advantage of its trained tokens as the trainer got it."""
    sent_spread: float
    """Mean distance of its tokens' advantages from that mean, which is the KL penalty's doing."""
    uneven: bool
    """Some of its trained tokens were sent with no advantage, and others with one."""
    turns: int
    last_turn_only: bool
    """Of several turns only the last was sent with an advantage."""
    version: int
    temperature: float
    length: int
    """Sampled tokens."""
    cut_off: bool
    repeats: bool
    surprise: float
    """Minus the mean log-prob of its sampled tokens: an entropy, in nats a token."""
    gap: float | None
    """Mean difference of the sampler's and the trainer's log-probs, without sign; None if not trained."""
    shifted_gap: float | None
    """The same after moving one of the two by a token, whichever way fits better."""
    agrees: bool | None
    """The reference answer stands in the response; None where either is unknown."""
    exact: bool | None
    """The response is the reference but for case, spaces and the full stop."""
    response: str
    """The text that was graded, its end; empty where that is unknown."""
    trained: bool
    prompt_length: int
    """Tokens."""
    ended_by: str
    """The text of the last sampled token; `END` for an end-of-text token, empty where the answer was cut off."""
    oddity: str | None
    """What does not fit the model in the prompt's tokens."""
    misread: str | None
    """`prompt` or `response` if the environment's text of it is not the text the model's tokens spell."""
    garbled: bool
    end_inside: bool
    """An end-of-text token stands in the middle of an answer."""
    logprobs: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    number: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample]

    @cached_property
    def groups(self) -> list[list[Sample]]:
        groups: dict[int, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.group].append(sample)
        return list(groups.values())


@dataclass(frozen=True)
class Evaluation:
    version: int
    samples: Sequence[Sample]

    @cached_property
    def by_place(self) -> dict[tuple[str, int, int], Sample]:
        """Evaluations repeat their seeds, so the same place in two of them is the same draw."""
        return {(s.problem, s.group, s.member): s for s in self.samples}


@dataclass(frozen=True)
class Evidence:
    """A run, or a window of one."""

    config: Json
    steps: Sequence[Step]
    evaluations: Sequence[Evaluation] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[Sample]:
        return [sample for step in self.steps for sample in step.samples]

    @cached_property
    def span(self) -> tuple[int, int]:
        return self.steps[0].number, self.steps[-1].number

    @cached_property
    def reward_range(self) -> float:
        """Between the lowest and the highest reward, but for the outermost hundredth on either side."""
        rewards = [sample.reward for sample in self.samples]
        return float(np.subtract(*np.percentile(rewards, [99, 1]))) if rewards else 0.0

    @property
    def complete(self) -> bool:
        """Every rollout was written, so samples stand for all of them."""
        return bool(self.config.get("rollout_json_export", True))

    def series(self, metric: str) -> tuple[list[int], np.ndarray]:
        """The steps that have a finite value of the metric, and the values."""
        points = [(s.number, s.metrics[metric]) for s in self.steps if np.isfinite(s.metrics.get(metric, np.nan))]
        return [number for number, _ in points], np.array([value for _, value in points], dtype=np.float64)

    def window(self, first: int, last: int) -> Evidence:
        """Steps `first` to `last`; of the evaluations also the very first, to compare with."""
        steps = [step for step in self.steps if first <= step.number <= last]
        near = [e for i, e in enumerate(self.evaluations) if i == 0 or first <= e.version <= last + 1]
        return Evidence(self.config, steps, near)


# --------------------------------------------------------------------------------------------------------------------
# From a run directory


def read_evidence(run_dir: RunDir, last: int | None = None) -> Evidence:
    """`last`: only so many steps from the end."""
    metrics = {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in run_dir.metrics()}
    steps = [
        Step(number, metrics.get(number, {}), [sample_of(record) for record in run_dir.rollouts(number)])
        for number in run_dir.rollout_steps()[-(last or 0) :]
    ]
    evaluations = [
        Evaluation(version, [sample_of(record, keep=True) for record in run_dir.rollouts(version, EVALUATION)])
        for version in run_dir.rollout_steps(EVALUATION)
    ]
    return Evidence(run_dir.config() or {}, steps, evaluations)


def samples_of(records: Iterable[RolloutRecord], keep: bool = False) -> list[Sample]:
    return [sample_of(record, keep) for record in records]


def sample_of(record: RolloutRecord, keep: bool = False) -> Sample:
    """`keep`: with its tokens and their log-probs, as evaluations need them."""
    sampled = np.array(record.mask, dtype=bool)
    logprobs = np.array(record.logprobs, dtype=np.float64)[sampled]
    logs = record.turns[-1].logs if record.turns else {}
    reference = str(logs["reference"]) if "reference" in logs else None
    gap, shifted = _gaps(record)
    sent, spread = _sent(record)
    return Sample(
        step=record.step,
        group=record.group,
        member=record.member,
        problem=record.problem or f"{stable_hash(record.prompt_tokens):08x}",
        prompt=_short(record.prompt_text),
        completion=_short(record.completion_text),
        reference=reference,
        prompt_key=_prompt_key(record),
        completion_key=stable_hash(record.completion_tokens),
        reward=record.reward,
        terms=record.reward_terms,
        advantage=record.advantage,
        sent=sent,
        sent_spread=spread,
        uneven=_uneven(record),
        turns=len(record.turns),
        last_turn_only=_last_turn_only(record),
        version=record.policy_version,
        temperature=record.temperature,
        length=int(sampled.sum()),
        cut_off=record.stop_reason in CUT_OFF,
        repeats=_repeats([t for t, m in zip(record.completion_tokens, sampled, strict=True) if m]),
        surprise=float(-logprobs.mean()) if len(logprobs) else 0.0,
        gap=gap,
        shifted_gap=shifted,
        agrees=_agrees(reference, logs.get("response")),
        exact=_exact(reference, logs.get("response")),
        response=_short(str(logs.get("response", ""))),
        trained=record.trained,
        prompt_length=len(record.prompt_tokens),
        ended_by=_ended_by(record),
        oddity=record.prompt_oddity,
        misread=_misread(record),
        garbled=_garbled(record.prompt_text, 0.02) or _garbled(record.completion_text, 0.3),
        end_inside=_end_inside(record),
        logprobs=tuple(record.logprobs[:LOGPROBS_KEPT]) if keep else (),
        tokens=tuple(record.completion_tokens[:LOGPROBS_KEPT]) if keep else (),
    )


def _short(text: str) -> str:
    """The end of a long text: where a prompt asks and a completion answers."""
    return text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:]


def _prompt_key(record: RolloutRecord) -> int:
    """Text that lost characters on the way from its tokens is no name for them."""
    if NOT_TEXT.search(record.prompt_text):
        return stable_hash(record.prompt_tokens)
    return stable_hash(_without_spaces(record.prompt_text).lower())


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _sent(record: RolloutRecord) -> tuple[float | None, float]:
    if record.advantages is None:
        return None, 0.0
    nonzero = np.array([a for a in record.advantages if a])
    return (float(nonzero.mean()), float(np.abs(nonzero - nonzero.mean()).mean())) if len(nonzero) else (0.0, 0.0)


def _uneven(record: RolloutRecord) -> bool:
    if record.advantages is None or len(record.turns) != 1:  # turns may be kept out of training on purpose
        return False
    trained = [a for a, m in zip(record.advantages, record.mask, strict=True) if m]
    return any(trained) and not all(trained)


def _last_turn_only(record: RolloutRecord) -> bool:
    if record.advantages is None or len(record.turns) < 2:
        return False
    *earlier, last = (any(record.advantages[turn.start : turn.end]) for turn in record.turns)
    return last and not any(earlier)


def _gaps(record: RolloutRecord) -> tuple[float | None, float | None]:
    if record.train_logprobs is None or not record.advantages:
        return None, None
    trained = np.array(record.advantages) != 0
    ours, theirs = np.array(record.logprobs)[trained], np.array(record.train_logprobs)[trained]
    if not len(ours):
        return None, None
    gap = float(np.abs(ours - theirs).mean())
    if len(ours) < 3:
        return gap, None
    shifted = min(np.abs(ours[1:] - theirs[:-1]).mean(), np.abs(ours[:-1] - theirs[1:]).mean())
    return gap, float(shifted)


def _repeats(tokens: Sequence[int]) -> bool:
    """Half of the pieces of four tokens stand elsewhere in the answer too."""
    if len(tokens) < 7:
        return False
    pieces = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.int64), 4) @ PIECE_HASH
    return len(np.unique(pieces)) <= len(pieces) / 2


def _agrees(reference: str | None, response: object) -> bool | None:
    if reference is None or not reference.strip() or not isinstance(response, str):
        return None
    return stands_in(reference, response)


def stands_in(reference: str, response: str) -> bool:
    """As words of their own, whatever the case."""
    if reference.strip().lower() not in response.lower():
        return False
    return re.search(rf"(?<!\w){re.escape(reference.strip())}(?!\w)", response, re.IGNORECASE) is not None


def _exact(reference: str | None, response: object) -> bool | None:
    if reference is None or not reference.strip() or not isinstance(response, str):
        return None
    return _bare(reference) == _bare(SPECIAL.sub("", response))


def _bare(text: str) -> str:
    return _without_spaces(text).rstrip(".").casefold()


def _ended_by(record: RolloutRecord) -> str:
    if record.stop_reason in CUT_OFF or not record.completion_pieces or not record.mask[-1]:
        return ""
    piece = record.completion_pieces[-1]
    return END if END_TOKEN.fullmatch(piece.strip()) else piece


def _misread(record: RolloutRecord) -> str | None:
    if len(record.turns) != 1:
        return None
    logs = record.turns[0].logs
    for name, key, text in (
        ("prompt", "question", record.prompt_text),
        ("response", "response", record.completion_text),
    ):
        said = logs.get(key)  # without the special tokens, which a renderer leaves out
        if isinstance(said, str) and _plain(said) not in _plain(text):
            return name
    return None


def _plain(text: str) -> str:
    return _without_spaces(SPECIAL.sub("", text))


def _garbled(text: str, limit: float) -> bool:
    """More than `limit` of the characters are ones that text does not have: replacements, control codes."""
    return len(NOT_TEXT.findall(text)) > limit * len(text)


def _end_inside(record: RolloutRecord) -> bool:
    """Within a turn's answer, before its last token."""
    pieces = {piece for turn in record.turns for piece in record.completion_pieces[turn.start : max(turn.end - 1, 0)]}
    return any(END_TOKEN.fullmatch(piece.strip()) for piece in pieces)
