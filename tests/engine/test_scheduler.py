"""Who runs when: plain integers, no model. A loop stands in for the runner and draws token 7 for everybody."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from mint.engine.sampler.cache import BlockCache
from mint.engine.sampler.scheduler import Plan, Scheduler
from mint.engine.sampler.sequence import Group, Sequence
from mint.types import ModelInput, SampleRequest, SamplingParams

arrivals = count()


def scheduler(blocks: int = 100, budget: int = 64, places: int = 16, block_size: int = 4, burst: int = 1) -> Scheduler:
    return Scheduler(BlockCache(block_size, blocks, blocks), budget, places, burst)


def sequence(prompt: int | list[int], copies: int = 1, policy: int = 0, max_tokens: int = 5) -> Sequence:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    group = Group(
        request=SampleRequest(ModelInput.from_ints(tokens)),
        prompt=tokens, adapter=None, policy=policy, max_tokens=max_tokens, stop_ids=frozenset(), seed=0,
        arrival=next(arrivals), on_done=lambda answer: None, on_tokens=None,
    )  # fmt: skip
    return Sequence(group, 0, copies, 0, list(tokens))


def step(scheduler: Scheduler) -> Plan:
    """Carries out a plan as the sampler would, with checks no plan may fail."""
    plan = scheduler.schedule()
    writers: dict[int, Sequence] = {}
    for work in plan.work:
        first, last = work.sequence.computed, work.sequence.computed + work.count + work.steps - 2
        for index in range(first // 4, last // 4 + 1):
            block = work.sequence.blocks[index]
            assert writers.setdefault(block, work.sequence) is work.sequence, "two sequences write to one block"
            if len(work.draws) <= 1:
                assert not scheduler.cache.is_shared(block) or work.sequence.published > index
    scheduler.commit(plan)
    for work in plan.work:
        for drawing in work.draws:
            drawing.tokens += [7] * work.steps
            drawing.logprobs += [-1.0] * work.steps
            if drawing.drawn == drawing.group.max_tokens:
                scheduler.remove(drawing)
    return plan


def counts(plan: Plan) -> list[int]:
    return [work.count for work in plan.work]


def test_a_prompt_is_read_once_for_all_its_samples() -> None:
    s = scheduler()
    s.add(sequence(10, copies=8))
    first = step(s)
    assert counts(first) == [10] and len(first.work[0].draws) == 8
    assert len(s.running) == 8
    assert counts(step(s)) == [1] * 8


def test_samples_share_the_prompts_blocks_and_copy_the_last_one_when_they_write() -> None:
    s = scheduler()
    s.add(sequence(10, copies=3))
    step(s)
    assert s.cache.used == 3  # 10 tokens in blocks of 4
    assert len(step(s).copies) == 2  # the last of the three keeps the original
    a, b, c = (running.blocks for running in s.running)
    assert a[:2] == b[:2] == c[:2] and len({a[2], b[2], c[2]}) == 3


def test_nothing_is_copied_when_the_prompt_fills_its_blocks() -> None:
    s = scheduler()
    s.add(sequence(8, copies=3))
    step(s)
    plan = step(s)
    assert plan.copies == [] and s.cache.used == 2 + 3


def test_a_long_prompt_goes_in_chunks_beside_running_sequences() -> None:
    s = scheduler(budget=8)
    s.add(sequence(3, max_tokens=20))
    step(s)
    s.add(sequence([9] * 20))
    assert [sorted(counts(step(s))) for _ in range(4)] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_the_budget_goes_to_prompts_in_order_of_arrival() -> None:
    s = scheduler(budget=10)
    first, second = sequence([1] * 8), sequence([2] * 8)
    s.add(second)
    s.add(first)  # added later, but older
    plan = step(s)
    assert [(work.sequence is first, work.count) for work in plan.work] == [(True, 8), (False, 2)]


def test_sequences_of_one_policy_stand_together() -> None:
    s = scheduler()
    for policy in (2, 0, 1, 0, 2):
        s.add(sequence(3 + policy, policy=policy))
    assert [work.sequence.group.policy for work in step(s).work] == [0, 0, 1, 2, 2]


def test_requests_join_and_leave_between_steps() -> None:
    s = scheduler()
    s.add(sequence(4, max_tokens=2))
    step(s)
    s.add(sequence([5] * 6, max_tokens=2))
    assert sorted(counts(step(s))) == [1, 6]
    assert counts(step(s)) == [1]
    assert not s.running and not s.waiting and s.cache.used == 0


def test_no_more_samples_run_than_there_are_places() -> None:
    s = scheduler(places=4)
    s.add(sequence(4, copies=3, max_tokens=2))
    s.add(sequence([5] * 4, copies=2, max_tokens=2))
    s.add(sequence([6] * 4, copies=1, max_tokens=2))
    assert len(step(s).work) == 1
    assert len(step(s).work) == 3, "the second request waits for its two places, and the third stays behind it"
    assert len(step(s).work) == 2


def test_the_same_prompt_again_reads_only_its_last_block() -> None:
    s = scheduler()
    s.add(sequence(11, max_tokens=1))
    step(s)
    again = sequence(11, max_tokens=1)
    s.add(again)
    assert counts(step(s)) == [3] and again.group.cached_tokens == 8


def test_equal_prompts_of_one_step_are_read_once() -> None:
    s = scheduler()
    s.add(sequence(11))
    s.add(sequence(11))
    assert counts(step(s)) == [11, 3]


def test_a_prompt_that_fills_its_blocks_is_still_read_at_its_end() -> None:
    s = scheduler()
    for _ in range(2):
        s.add(sequence(8, max_tokens=1))
        plan = step(s)
    assert counts(plan) == [4]


def test_when_blocks_run_out_the_youngest_gives_way_and_finishes_later() -> None:
    s = scheduler(blocks=6)
    old, young = sequence(8, max_tokens=12), sequence([9] * 8, max_tokens=12)
    s.add(old)
    s.add(young)
    gave_way = False
    for _ in range(40):
        step(s)
        gave_way = gave_way or (young in s.waiting and old in s.running)
        assert not (old in s.waiting and young in s.running)
        if not s.running and not s.waiting:
            break
    assert gave_way
    assert old.drawn == young.drawn == 12 and s.cache.used == 0


def test_a_group_larger_than_the_pool_still_finishes() -> None:
    s = scheduler(blocks=5, places=8)
    leader = sequence(6, copies=8, max_tokens=12)
    s.add(leader)
    done: set[int] = set()
    for _ in range(300):
        done |= {d.index for work in step(s).work for d in work.draws if d.drawn == 12}
    assert done == set(range(8)) and not s.waiting and s.cache.used == 0


def test_a_removed_sequence_leaves_no_block_behind() -> None:
    s = scheduler()
    s.add(sequence(10, copies=2))
    waiting = sequence(3)
    step(s)
    s.add(waiting)
    s.remove(waiting)
    for running in list(s.running):
        s.remove(running)
    assert s.cache.used == 0 and s.schedule().work == []


def test_sequences_that_only_decode_draw_several_tokens_a_step_but_never_more_than_they_may() -> None:
    s = scheduler(burst=8)
    s.add(sequence(10, max_tokens=30))
    s.add(sequence(6, max_tokens=4))
    assert [work.steps for work in step(s).work] == [1, 1], "a step that reads prompts draws one token"
    assert [work.steps for work in step(s).work] == [8, 3]
    assert [work.steps for work in step(s).work] == [8]
    while s.running:
        step(s)
    assert s.cache.used == 0


def test_a_burst_never_makes_anybody_give_way() -> None:
    s = scheduler(blocks=6, burst=16)
    s.add(sequence(8, max_tokens=12))
    s.add(sequence([5, 5, 5, 5], max_tokens=5))
    step(s)
    plan = step(s)
    assert len(plan.work) == 2 and [work.steps for work in plan.work] == [1, 1]


def test_who_wants_more_than_tokens_draws_one_a_step() -> None:
    s = scheduler(burst=8)
    special, filtered = sequence(4, max_tokens=9), sequence(4, max_tokens=9)
    filtered.group.request = SampleRequest(ModelInput.from_ints([0]), SamplingParams(top_p=0.5))
    special.group.request = replace(filtered.group.request, topk_sample_logprobs=3)
    s.add(filtered)
    step(s)
    assert [work.steps for work in step(s).work] == [8]
    s.add(special)
    step(s)
    assert [work.steps for work in step(s).work] == [1]


def test_prompts_are_read_on_before_the_first_tokens_are_known_but_not_for_ever() -> None:
    s = scheduler(burst=8, budget=8)
    for n in range(7):
        s.add(sequence([n + 1] * 8, max_tokens=3))
    plans = [s.schedule()]
    s.commit(plans[0])
    while following := s.follow(plans[-1]):
        s.commit(following)
        plans.append(following)
    assert [counts(plan) for plan in plans] == [[8]] * 4
    assert not any(plan.decodes or plan.follows for plan in plans)
    for plan in plans:
        plan.work[0].sequence.tokens.append(7)
        plan.work[0].sequence.logprobs.append(-1.0)
    mixed = s.schedule()
    s.commit(mixed)
    assert counts(mixed) == [1, 1, 1, 1, 4], "those that decode have their turn"
    again = s.follow(mixed)
    assert again is not None and counts(again) == [4, 4], "nobody who decodes"
    s.commit(again)
    assert s.follow(again) is None, "they have waited for one step"


def test_everybody_decodes_behind_the_last_prompts_before_the_first_tokens_are_known() -> None:
    s = scheduler(burst=8, budget=16)
    s.add(sequence(6, max_tokens=20))
    step(s)
    s.add(sequence([1] * 10, copies=3, max_tokens=5))
    s.add(sequence([2] * 4, max_tokens=1))
    reading = s.schedule()
    s.commit(reading)
    assert counts(reading) == [1, 10, 4]
    following = s.follow(reading)
    assert following is not None and following.decodes and not following.follows
    assert [work.ahead for work in following.work] == [1, 1, 1, 1], "the fifth will have drawn all it may"
    assert [work.steps for work in following.work] == [8, 4, 4, 4]
    assert len(following.copies) == 2, "each sample writes to a block of its own behind the prompt, one to the prompt's"
    lasts = [work.sequence.blocks[work.sequence.computed // 4] for work in following.work]
    assert len(set(lasts)) == 4 and not any(map(s.cache.is_shared, lasts))
    for work in following.work:
        assert len(work.sequence.blocks) == s.cache.blocks_for(work.sequence.computed + work.steps)


def test_nobody_decodes_behind_prompts_if_somebody_would_have_to_give_way_or_waits_or_goes_token_by_token() -> None:
    s = scheduler(blocks=6, burst=8)
    s.add(sequence(9, copies=3, max_tokens=9))
    full = s.schedule()
    s.commit(full)
    free = s.cache.available
    assert len(full.work[0].draws) == 3 and s.follow(full) is None and s.cache.available == free
    s = scheduler(places=1, burst=8)
    s.add(sequence(4))
    s.add(sequence(4))
    one = s.schedule()
    s.commit(one)
    assert counts(one) == [4] and s.follow(one) is None
    s = scheduler(burst=8)
    special = sequence(4)
    special.group.request = replace(special.group.request, topk_sample_logprobs=3)
    s.add(special)
    alone = s.schedule()
    s.commit(alone)
    assert s.follow(alone) is None


def test_a_step_that_follows_goes_on_where_the_one_before_it_will_end() -> None:
    s = scheduler(burst=8)
    s.add(sequence(10, max_tokens=30))
    s.add(sequence(6, max_tokens=9))
    step(s)
    plan = s.schedule()
    s.commit(plan)
    following = s.follow(plan)
    assert [work.steps for work in plan.work] == [8, 8] and following is not None and following.follows
    assert [(work.ahead, work.steps) for work in following.work] == [(8, 8)], "the other will have drawn all it may"
    assert len(following.work[0].sequence.blocks) == s.cache.blocks_for(10 + 8 + 8)


def test_nothing_follows_while_somebody_could_join() -> None:
    s = scheduler(burst=8, places=2)
    s.add(sequence(10, max_tokens=30))
    step(s)
    plan = s.schedule()
    s.commit(plan)
    s.add(sequence(4, max_tokens=30))
    assert s.follow(plan) is None


def test_a_full_house_goes_on_unless_a_place_becomes_free() -> None:
    for other, follows in ((30, True), (6, False)):
        s = scheduler(burst=8, places=2)
        s.add(sequence(10, max_tokens=30))
        s.add(sequence(4, max_tokens=other))
        step(s)
        s.add(sequence(4, max_tokens=30))
        plan = s.schedule()
        s.commit(plan)
        assert (s.follow(plan) is not None) is follows


def test_nothing_follows_that_would_make_somebody_give_way() -> None:
    s = scheduler(blocks=5, burst=4)
    s.add(sequence(8, max_tokens=30))
    step(s)
    plan = s.schedule()
    assert [work.steps for work in plan.work] == [4]
    s.commit(plan)
    following = s.follow(plan)
    assert following is not None
    following.work[0].sequence.tokens += [7] * 4
    following.work[0].sequence.logprobs += [-1.0] * 4
    s.commit(following)
    taken = s.cache.take(s.cache.available)
    assert s.follow(following) is None and taken is not None
