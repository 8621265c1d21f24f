import asyncio
from collections.abc import Sequence

import pytest

from mint.errors import BadRequest
from mint.rl.completers import MessageCompleter
from mint.rl.judges import (
    Comparison,
    PairwiseJudge,
    PairwisePreferenceGroupBuilder,
    RubricJudge,
    TournamentPattern,
    get_pairs,
)
from mint.rl.renderers import ChatRenderer
from mint.rl.rewards import call_reward
from mint.rl.types import Message, Trajectory
from tests.rl.fakes import CharTokenizer
from tests.rl.groups import trajectory, transition

TOKENIZER = CharTokenizer()
BOTH_WAYS, ONE_WAY = TournamentPattern.ALL_PAIRS_BOTH_WAYS, TournamentPattern.ALL_PAIRS_ONE_WAY


class Says(MessageCompleter):
    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[str] = []

    async def __call__(self, messages: Sequence[Message]) -> Message:
        self.asked.append(messages[-1]["content"])
        return {"role": "assistant", "content": self.text}


def test_who_meets_whom() -> None:
    assert get_pairs(3, ONE_WAY) == [(0, 1), (0, 2), (1, 2)]
    assert sorted(get_pairs(3, BOTH_WAYS)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert get_pairs(5, ONE_WAY, chunk_size=2) == [(0, 1), (2, 3)]


async def longer_is_better(comparison: Comparison) -> float:
    a, b = (len(c[0]["content"]) for c in (comparison.completion_A, comparison.completion_B))
    return float(b > a) - float(b < a)


def replies(*texts: str) -> list[Trajectory]:
    return [trajectory(transition([1], TOKENIZER.encode(text))) for text in texts]


def builder(pattern: TournamentPattern, **options: object) -> PairwisePreferenceGroupBuilder:
    ask = [{"role": "user", "content": "hi"}]
    return PairwisePreferenceGroupBuilder(ask, ChatRenderer(TOKENIZER), pattern, longer_is_better, 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [BOTH_WAYS, ONE_WAY])
def test_rewards_are_wins_minus_losses_over_games(pattern: TournamentPattern) -> None:
    graded = asyncio.run(builder(pattern).compute_group_rewards(replies("a\x00", "aaa\x00", "aa\x00", "aa\x00"), []))
    # against three others: 0 wins 3 losses, 3 wins, and twice 1 win 1 loss 1 tie
    assert [reward for reward, _ in graded] == pytest.approx([-1.0, 1.0, 0.0, 0.0])
    assert graded[1][1] == {"win_minus_loss": 1.0, "format": 1.0}


def test_an_unended_reply_costs_one() -> None:
    graded = asyncio.run(builder(ONE_WAY).compute_group_rewards(replies("a\x00", "aa"), []))
    assert [reward for reward, _ in graded] == pytest.approx([-1.0, 0.0])


def test_replies_may_be_prepared_for_the_judge() -> None:
    cut = builder(ONE_WAY, content_preprocessor=lambda text: text[:1])
    graded = asyncio.run(cut.compute_group_rewards(replies("a\x00", "aaa\x00"), []))
    assert [reward for reward, _ in graded] == [0.0, 0.0]


def test_both_ways_cancel_a_liking_for_the_first_place() -> None:
    async def first_is_better(comparison: Comparison) -> float:
        return -1.0

    for pattern, rewards in ((BOTH_WAYS, [0.0, 0.0]), (ONE_WAY, [1.0, -1.0])):
        made = PairwisePreferenceGroupBuilder([], ChatRenderer(TOKENIZER), pattern, first_is_better, 2)
        graded = asyncio.run(made.compute_group_rewards(replies("a\x00", "b\x00"), []))
        assert [reward for reward, _ in graded] == rewards


def test_a_preference_out_of_range_is_refused() -> None:
    async def wild(comparison: Comparison) -> float:
        return 2.0

    made = PairwisePreferenceGroupBuilder([], ChatRenderer(TOKENIZER), ONE_WAY, wild, 2)
    with pytest.raises(BadRequest, match=r"returned 2\.0 for members 0 and 1"):
        asyncio.run(made.compute_group_rewards(replies("a\x00", "b\x00"), []))


def test_a_group_of_replies_can_be_made() -> None:
    made = builder(ONE_WAY)
    envs = asyncio.run(made.make_envs())
    assert len(envs) == 4
    observation, stop = asyncio.run(envs[0].initial_observation())  # type: ignore[misc]
    assert TOKENIZER.decode(observation.to_ints()) == "<user>hi<assistant>"
    assert stop == [0]
    assert asyncio.run(envs[0].step(TOKENIZER.encode("a\x00"))).reward == 0.0


COMPARISON = Comparison(
    [{"role": "user", "content": "q"}],
    [{"role": "assistant", "content": "first"}],
    [{"role": "assistant", "content": "second"}],
)


@pytest.mark.parametrize(
    ("verdict", "preference"),
    [("B", 1.0), ("A", -1.0), ("T", 0.0), ("A is fine, but I say B", 1.0), ("Both are Awful", 0.0)],
)
def test_a_judge_answers_with_a_letter(verdict: str, preference: float) -> None:
    judge = Says(verdict)
    assert asyncio.run(PairwiseJudge(judge)(COMPARISON)) == preference
    assert judge.asked[0].index("first") < judge.asked[0].index("second")
    assert COMPARISON.swap().completion_A == COMPARISON.completion_B


def test_a_rubric_gives_marks_between_0_and_1() -> None:
    judge = Says("Score: 2? No. Final Score: 7")
    assert asyncio.run(call_reward(RubricJudge(judge, "be brief"), "p", "a", {})) == 0.7
    assert "be brief" in judge.asked[0]


@pytest.mark.parametrize("verdict", ["very good", "Score: 11"])
def test_a_judge_without_a_mark_is_an_error_and_never_a_score(verdict: str) -> None:
    with pytest.raises(BadRequest, match="no score from 0 to 10"):
        asyncio.run(RubricJudge(Says(verdict), "be brief")("p", "a"))
