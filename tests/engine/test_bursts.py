"""Steps of several tokens, begun before the last one's tokens are known, give what single steps give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mint.engine.model import BaseModel
from mint.engine.sampler import sampler as sampler_module
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.runners import reader_for, runner_for
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.scheduler import Plan, Work
from mint.engine.sampler.sequence import Sequence
from mint.errors import Internal
from mint.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

BURST = 4


class Bursts(Runner):
    """Carries out bursts token by token, from what it has drawn itself: like a device, it is not told in between."""

    burst = BURST

    def __init__(self, model: BaseModel, block_size: int) -> None:
        super().__init__(model, reader_for(model, block_size))
        self._drawn: dict[Sequence, list[int]] = {}
        self.followed = self.unseen = 0

    def run(self, plan: Plan) -> Iterator[Drawn]:  # type: ignore[override]
        if not plan.decodes:
            drawn = super().run(plan)
            self._drawn = {one.sequence: one.tokens for one in drawn}
            return iter(drawn)
        self.followed += plan.follows
        self.unseen += not plan.follows and any(work.ahead for work in plan.work)
        self._drawn = {
            work.sequence: self._drawn[work.sequence][-work.ahead :] if work.ahead else [] for work in plan.work
        }
        logprobs: dict[Sequence, list[float]] = {work.sequence: [] for work in plan.work}
        for step in range(max(work.steps for work in plan.work)):
            works = [self._at(work, step) for work in plan.work if step < work.steps]
            still = [work.sequence for work in plan.work if step < work.steps]
            one = replace(plan, work=works, fresh=plan.fresh if step == 0 else [], copies=[] if step else plan.copies)
            for sequence, drawn in zip(still, super().run(one), strict=True):
                self._drawn[sequence] += drawn.tokens
                logprobs[sequence] += drawn.logprobs
        drawn = [Drawn(w.sequence, self._drawn[w.sequence][-w.steps :], logprobs[w.sequence]) for w in plan.work]
        for work in plan.work:
            self._drawn[work.sequence] = self._drawn[work.sequence][-work.steps :]
        return iter(drawn)

    def _at(self, work: Work, step: int) -> Work:
        """The work's sequence as it will be after so many steps."""
        drawn = self._drawn[work.sequence]
        sequence = replace(
            work.sequence, tokens=work.sequence.tokens + drawn, computed=work.sequence.computed + step,
            logprobs=[*work.sequence.logprobs, *(0.0 for _ in drawn)],
        )  # fmt: skip
        return Work(sequence, 1, [sequence])


def ask(tokens: list[int], samples: int = 1, max_tokens: int = 20, stop: list[int] | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=sum(tokens), stop=stop or [])
    return SampleRequest(ModelInput.from_ints(tokens), params, samples)


def answers(sampler: Sampler, asked: list[SampleRequest], late: int = 0) -> list[SampleResponse]:
    """The last `late` requests come after two steps."""
    found: dict[int, SampleResponse] = {}

    def add(n: int) -> None:
        sampler.add(asked[n], None, lambda answer: found.__setitem__(n, answer))  # type: ignore[arg-type]

    first = len(asked) - late
    for n in range(first):
        add(n)
    sampler.step()
    sampler.step()
    sampler.settle()
    for n in range(first, len(asked)):
        add(n)
    while sampler.has_work:
        sampler.step()
    return [found[n] for n in range(len(asked))]


@pytest.fixture
def samplers(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Limits], tuple[Sampler, Sampler]]:
    def make(limits: Limits) -> tuple[Sampler, Sampler]:
        made = []
        for runner in (runner_for, Bursts):
            monkeypatch.setattr(sampler_module, "runner_for", runner)
            made.append(Sampler(tiny_model("qwen3"), limits))
        return made[0], made[1]

    return make


ROOM = Limits(block_size=4, blocks=400, max_blocks=400, token_budget=64, max_sequences=32)
TEXTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(3, 30))]


@pytest.mark.parametrize("late", [0, 2])
def test_bursts_draw_what_single_steps_draw(samplers: Callable[[Limits], tuple[Sampler, Sampler]], late: int) -> None:
    plain, bursts = samplers(ROOM)
    asked = [ask(text, 3, 7 * n + 9) for n, text in enumerate(TEXTS)]
    assert answers(bursts, asked, late) == answers(plain, asked, late)
    assert bursts.runner.followed > 2 and bursts.runner.unseen  # type: ignore[attr-defined]
    assert bursts.cache.used == 0


def test_whoever_stops_in_a_burst_draws_no_more_and_the_others_go_on(
    samplers: Callable[[Limits], tuple[Sampler, Sampler]],
) -> None:
    free = answers(samplers(ROOM)[0], [ask(text, 3, 24) for text in TEXTS])
    plain, bursts = samplers(ROOM)
    stops = [answer.sequences[0].tokens[n] for answer, n in zip(free, (2, 9, 15), strict=True)]
    asked = [ask(text, 3, 24, [stop]) for text, stop in zip(TEXTS, stops, strict=True)]
    found = answers(bursts, asked)
    assert found == answers(plain, asked)
    assert {sequence.stop_reason for answer in found for sequence in answer.sequences} >= {"stop"}
    assert bursts.cache.used == 0


def test_with_few_blocks_bursts_give_way_and_come_back_as_single_steps_do(
    samplers: Callable[[Limits], tuple[Sampler, Sampler]],
) -> None:
    plain, bursts = samplers(replace(ROOM, blocks=24, max_blocks=24))
    asked = [ask(text, 2, 30) for text in TEXTS]
    assert answers(bursts, asked) == answers(plain, asked)
    assert bursts.cache.used == 0


def test_a_group_that_is_given_up_while_a_step_is_under_way_leaves_nothing_behind(
    samplers: Callable[[Limits], tuple[Sampler, Sampler]],
) -> None:
    plain, bursts = samplers(ROOM)
    heard: list[object] = []
    gone = bursts.add(ask(TEXTS[0], 2, 30), None, heard.append)
    kept: list[object] = []
    bursts.add(ask(TEXTS[1], 2, 30), None, kept.append)
    for _ in range(3):
        bursts.step()
    bursts.cancel(gone)
    while bursts.has_work:
        bursts.step()
    assert heard == [] and kept == answers(plain, [ask(TEXTS[1], 2, 30)])
    assert bursts.cache.used == 0
    assert answers(bursts, [ask(TEXTS[2], 2)]) == answers(plain, [ask(TEXTS[2], 2)])


def test_a_step_that_fails_behind_another_fails_what_ran_and_leaves_the_sampler_whole(
    samplers: Callable[[Limits], tuple[Sampler, Sampler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, bursts = samplers(ROOM)
    run = bursts.runner.run

    def failing(drawn: list[Drawn]) -> Iterator[Drawn]:
        yield from drawn
        raise RuntimeError("the device gave up")

    def fail_late(plan: Plan) -> Iterator[Drawn]:
        drawn = list(run(plan))
        return failing(drawn) if plan.follows else iter(drawn)

    monkeypatch.setattr(bursts.runner, "run", fail_late)
    heard: list[object] = []
    bursts.add(ask(TEXTS[0], 2, 30), None, heard.append)
    with pytest.raises(RuntimeError, match="gave up"):
        while bursts.has_work:
            bursts.step()
    bursts.abort(Internal("the device gave up"))
    assert [type(answer) for answer in heard] == [Internal] and not bursts.has_work and bursts.cache.used == 0
    monkeypatch.setattr(bursts.runner, "run", run)
    assert answers(bursts, [ask(TEXTS[1], 2)]) == answers(plain, [ask(TEXTS[1], 2)])
