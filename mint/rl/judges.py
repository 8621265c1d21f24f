"""Rewards from a judge: another model that compares answers or scores them by a rubric.

A judge is any `MessageCompleter`: a sampling client with a renderer, or an OpenAI-compatible endpoint. Comparisons are
played as a tournament inside a group; each member's reward is its wins minus its losses.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mint.errors import BadRequest
from mint.rl.completers import MessageCompleter
from mint.rl.hashing import stable_hash
from mint.rl.renderers import Renderer
from mint.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Message,
    Metrics,
    Observation,
    StepResult,
    StopCondition,
    Trajectory,
)
from mint.types import ModelInput

# --------------------------------------------------------------------------------------------------------------------
# Comparing two answers


@dataclass(frozen=True)
class Comparison:
    prompt_conversation: list[Message]
    completion_A: list[Message]
    completion_B: list[Message]

    def swap(self) -> Comparison:
        return Comparison(self.prompt_conversation, self.completion_B, self.completion_A)


PreferenceModel = Callable[[Comparison], Awaitable[float]]
"""How much B is better than A: from -1 (A by far) to 1 (B by far), 0 for a tie."""


def _as_text(messages: Sequence[Message]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@dataclass(frozen=True)
class PairwiseJudge:
    """A `PreferenceModel` that asks. An answer that names neither A nor B counts as a tie."""

    judge: MessageCompleter
    instruction: str = "Which reply is better? Answer with one letter: A, B, or T for a tie."

    async def __call__(self, comparison: Comparison) -> float:
        question = (
            f"Conversation:\n{_as_text(comparison.prompt_conversation)}\n\n"
            f"Reply A:\n{_as_text(comparison.completion_A)}\n\nReply B:\n{_as_text(comparison.completion_B)}\n\n"
            f"{self.instruction}"
        )
        verdict = await self.judge([{"role": "user", "content": question}])
        letters = re.findall(r"\b([ABT])\b", str(verdict["content"]))
        return {"A": -1.0, "B": 1.0}.get(letters[-1], 0.0) if letters else 0.0


class TournamentPattern(StrEnum):
    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"
    """Each pair twice, in both orders: a judge's liking for the first place cancels out."""
    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"


def get_pairs(n: int, pattern: TournamentPattern, chunk_size: int | None = None) -> list[tuple[int, int]]:
    """Who meets whom. Chunks of consecutive members play among themselves, so that games grow with n, not n squared."""
    chunk_size = chunk_size or n
    both_ways = pattern == TournamentPattern.ALL_PAIRS_BOTH_WAYS
    return [
        (i, j)
        for start in range(0, n, chunk_size)
        for i in range(start, min(start + chunk_size, n))
        for j in range(start, min(start + chunk_size, n))
        if i < j or (both_ways and i > j)
    ]


class ReplyEnv(Env):
    """One reply to a conversation; the group's tournament gives the reward."""

    def __init__(self, convo_prefix: Sequence[Message], renderer: Renderer) -> None:
        self.convo_prefix = list(convo_prefix)
        self.renderer = renderer

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self.renderer.build_generation_prompt(self.convo_prefix), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, _ = self.renderer.parse_response(action)
        logs = {"question": _as_text(self.convo_prefix), "response": str(message["content"])}
        return StepResult(0.0, True, ModelInput.empty(), None, logs=logs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """Members reply to one conversation and are compared pair by pair.

    Reward: (wins - losses) / games, in [-1, 1], less 1 for a reply that was not properly ended.
    """

    convo_prefix: list[Message]
    policy_renderer: Renderer
    tournament_pattern: TournamentPattern
    preference_model: PreferenceModel
    num_envs: int
    content_preprocessor: Callable[[str], str] | None = None
    """Applied to each reply before it is judged, to cut out reasoning for instance."""
    matchup_group_size: int | None = None
    """Members play in chunks of this size; None: everybody against everybody."""
    dataset_name: str = "preferences"

    async def make_envs(self) -> Sequence[Env]:
        return [ReplyEnv(self.convo_prefix, self.policy_renderer) for _ in range(self.num_envs)]

    def _reply(self, trajectory: Trajectory) -> tuple[Message, bool]:
        message, ended = self.policy_renderer.parse_response(trajectory.transitions[0].ac.tokens)
        if self.content_preprocessor is not None:
            message = {**message, "content": self.content_preprocessor(message["content"])}
        return message, ended

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        replies_G = [self._reply(trajectory) for trajectory in trajectory_group]
        pairs = get_pairs(len(replies_G), self.tournament_pattern, self.matchup_group_size)
        outcomes = await asyncio.gather(
            *(
                self.preference_model(Comparison(self.convo_prefix, [replies_G[i][0]], [replies_G[j][0]]))
                for i, j in pairs
            )
        )
        score_G, games_G = [0.0] * len(replies_G), [0] * len(replies_G)
        for (i, j), outcome in zip(pairs, outcomes, strict=True):
            if not -1 <= outcome <= 1:
                raise BadRequest(f"the preference model returned {outcome} for members {i} and {j}; expected -1 to 1.")
            score_G[i] -= outcome
            score_G[j] += outcome
            games_G[i] += 1
            games_G[j] += 1
        return [
            (
                score / max(games, 1) + float(ended) - 1.0,
                {"win_minus_loss": score / max(games, 1), "format": float(ended)},
            )
            for score, games, (_, ended) in zip(score_G, games_G, replies_G, strict=True)
        ]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]

    def problem_id(self) -> str:
        return f"{stable_hash(_as_text(self.convo_prefix)):08x}"


# --------------------------------------------------------------------------------------------------------------------
# Scoring one answer


@dataclass(frozen=True)
class RubricJudge:
    """A reward function in [0, 1]: the judge's mark out of `full_marks`, read from the end of its answer.

    An answer without a mark raises, so that a judge that fails is an error to retry and never a score.
    """

    judge: MessageCompleter
    rubric: str
    full_marks: int = 10

    async def __call__(self, prompt: str, answer: str) -> float:
        question = (
            f"Question:\n{prompt}\n\nAnswer:\n{answer}\n\nGrade the answer by this rubric:\n{self.rubric}\n\n"
            f"Reason briefly, then end with 'Score: n', n from 0 to {self.full_marks}."
        )
        verdict = str((await self.judge([{"role": "user", "content": question}]))["content"])
        marks = re.findall(r"[Ss]core:?\s*(\d+(?:\.\d+)?)", verdict)
        if not marks or not 0 <= float(marks[-1]) <= self.full_marks:
            raise BadRequest(f"the judge gave no score from 0 to {self.full_marks}: {verdict[-200:]!r}")
        return float(marks[-1]) / self.full_marks
