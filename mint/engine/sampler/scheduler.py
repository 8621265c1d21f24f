"""Who runs in the next step, and in which blocks. Integers only: this file never sees a tensor.

Every running sequence that only waits for its next token gets it; what is left of the step's token budget goes to
prompts, in order of arrival, in chunks if need be, so that a long prompt never holds up the others. When blocks run
out the youngest sequence gives its back and is read again later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from mint.engine.sampler.cache import BlockCache
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.streams import stream_of

# Steps of prompts that may follow one another before those that decode get their turn, if nobody decoded in the first.
_MOST_READING = 3


@dataclass(slots=True)
class Work:
    """One sequence's part of a step."""

    sequence: Sequence
    count: int
    """Tokens to read, from `sequence.computed` on."""
    draws: list[Sequence]
    """Who draws a token after the last of them: nobody yet, the sequence itself, or itself and its new copies."""
    steps: int = 1
    """Tokens to draw, each but the last read at once; more than one only for a sequence that decodes."""
    ahead: int = 0
    """Tokens drawn in the step before, which nobody has looked at yet (see `Scheduler.follow`)."""


@dataclass(slots=True)
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    """Sequences of one policy stand next to each other."""
    decodes: bool = False
    """Nothing but sequences that read the one token they drew last."""
    follows: bool = False
    """Some of the sequences of the step before and no others, begun before its tokens are known."""
    may_follow: int = 0
    """How many steps of prompts may be begun behind it, one that reads prompts, before its tokens are known."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy (from, to) before anything is written..."""
    fresh: list[int] = field(default_factory=list)
    """...and then blocks to clear."""
    blocks: int = 0
    """Size of the pool the plan assumes."""


class Scheduler:
    def __init__(self, cache: BlockCache, token_budget: int, max_sequences: int, burst: int = 1) -> None:
        """`token_budget`: tokens read in one step. `max_sequences`: samples that run at once; a single larger request
        runs in waves. `burst`: tokens each sequence may draw in one step in which all of them decode."""
        self.cache = cache
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.burst = burst
        self.waiting: list[Sequence] = []  # both lists from the oldest to the youngest
        self.running: list[Sequence] = []
        self._places = 0  # samples that run, those that stand behind a sequence included

    def add(self, sequence: Sequence) -> None:
        _put_by_age(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or unwanted sequence out and frees its blocks."""
        if sequence.running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self.token_budget
        # Oldest first: whoever has to give way is younger, so it has not been planned yet.
        for sequence in list(self.running):
            if sequence.running and _is_decoding(sequence) and self._make_room(sequence, plan):
                self._publish(sequence, sequence.computed + 1)
                plan.work.append(Work(sequence, 1, [sequence]))
                budget -= 1
        decoding = len(plan.work)
        self._plan_prompts(plan, budget)
        plan.decodes = len(plan.work) == decoding
        if plan.decodes and self.burst > 1:
            self._lengthen(plan)
        if self.burst > 1:
            plan.may_follow = 1 if decoding else _MOST_READING
        plan.blocks = self.cache.total + 1  # and the null block
        return plan

    def _plan_prompts(self, plan: Plan, budget: int) -> None:
        for sequence in list(self.running):
            if budget > 0 and sequence.pending and not _is_decoding(sequence):
                budget -= self._plan(plan, sequence, budget)
        while budget > 0 and self.waiting and self._admit(self.waiting[0], plan):
            budget -= self._plan(plan, self._start(), budget)
        plan.work.sort(key=lambda work: work.sequence.group.policy)

    def follow(self, plan: Plan) -> Plan | None:
        """The step after one that is committed and being carried out, as far as it can do without the tokens of that
        one; who turns out to have stopped has been planned in vain. None if it cannot, or if somebody could join
        instead."""
        if self.burst == 1:
            return None
        return self._go_on(plan) if plan.decodes else self._read_on(plan) or self._decode_on(plan)

    def _go_on(self, plan: Plan) -> Plan | None:
        """After a step in which everybody decodes: more tokens for those of them that may draw more."""
        if not all(work.sequence.group.bursts for work in plan.work):
            return None
        going = [work for work in plan.work if work.sequence.running and _left_after(work) > 0]
        ends = len(going) < len(plan.work)
        if not going or (self.waiting and (ends or self._has_place(self.waiting[0]))):
            return None
        following = [
            Work(work.sequence, 1, [work.sequence], min(self.burst, _left_after(work)), work.steps) for work in going
        ]
        if (taken := self._take_for(following)) is None:
            return None
        return Plan(following, decodes=True, follows=True, fresh=taken, blocks=self.cache.total + 1)

    def _read_on(self, plan: Plan) -> Plan | None:
        """After a step that reads prompts: more of them, and nobody who decodes. None if nothing is left to read, or it
        is the others' turn."""
        if not plan.may_follow:
            return None
        following = Plan(may_follow=plan.may_follow - 1)
        self._plan_prompts(following, self.token_budget)
        following.blocks = self.cache.total + 1
        return following if following.work else None

    def _decode_on(self, plan: Plan) -> Plan | None:
        """After a step that read the last prompts there were: everybody decodes, if there are blocks for it without
        anybody giving way."""
        if self.waiting or not all(_has_read(sequence) and sequence.group.bursts for sequence in self.running):
            return None
        drawing = {sequence for work in plan.work for sequence in work.draws}
        following = Plan(decodes=True)
        for sequence in self.running:
            ahead = int(sequence in drawing)
            if (left := sequence.group.max_tokens - sequence.drawn - ahead) > 0:
                following.work.append(Work(sequence, 1, [sequence], min(self.burst, left), ahead))
        if not following.work or sum(map(self._need, following.work)) > self.cache.available:
            return None
        following.work.sort(key=lambda work: work.sequence.group.policy)
        for work in following.work:
            self._make_room(work.sequence, following)
        following.fresh += self._take_for(following.work) or []
        following.blocks = self.cache.total + 1
        return following

    def commit(self, plan: Plan) -> None:
        """The plan has been carried out: its tokens are in the cache."""
        for work in plan.work:
            if not work.sequence.running:  # it stopped in the step before, which this one followed
                continue
            work.sequence.computed += work.count + work.steps - 1
            for sequence in work.draws:
                sequence.computed = work.sequence.computed

    def _lengthen(self, plan: Plan) -> None:
        """More tokens for everybody, if there are blocks for them without anybody giving way."""
        if not all(work.sequence.group.bursts for work in plan.work):
            return
        for work in plan.work:
            work.steps = min(self.burst, work.sequence.group.max_tokens - work.sequence.drawn)
        taken = self._take_for(plan.work)
        if taken is not None:
            plan.fresh += taken
        else:
            for work in plan.work:
                work.steps = 1

    def _take_for(self, works: list[Work]) -> list[int] | None:
        """The blocks that the work's tokens need beyond those the sequences have, now theirs; None if there are not
        enough of them."""
        needs = [
            self.cache.blocks_for(work.sequence.computed + work.steps) - len(work.sequence.blocks) for work in works
        ]
        taken = self.cache.take(sum(needs))
        if taken is not None:
            start = 0
            for work, need in zip(works, needs, strict=True):
                work.sequence.blocks += taken[start : start + need]
                start += need
        return taken

    def _need(self, work: Work) -> int:
        """Blocks that the work's tokens need at most: beyond those the sequence has, and for one it cannot write to."""
        sequence = work.sequence
        index = sequence.computed // self.cache.block_size
        copied = index < len(sequence.blocks) and self.cache.is_shared(sequence.blocks[index])
        return self.cache.blocks_for(sequence.computed + work.steps) - len(sequence.blocks) + copied

    def _plan(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        count = min(sequence.pending, budget)
        self._publish(sequence, sequence.computed + count)
        draws = [sequence, *self._fork(sequence)] if count == sequence.pending else []
        plan.work.append(Work(sequence, count, draws))
        return count

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Blocks that this step fills can be found from now on, also by sequences of the same step: every layer writes
        all keys and values before it reads any."""
        size = self.cache.block_size
        while (sequence.published + 1) * size <= computed:
            start, block = sequence.published * size, sequence.blocks[sequence.published]
            tokens = sequence.tokens[start : start + size]
            sequence.digest = self.cache.publish(sequence.group.policy, sequence.digest, tokens, block)
            sequence.published += 1

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The other samples that stood behind `leader`, from here on sequences of their own."""
        first, seed = leader.index, leader.group.seed
        forks = [leader.fork(i, stream_of(seed, i)) for i in range(first + 1, first + leader.copies)]
        leader.copies = 1
        for fork in forks:
            self.cache.share(fork.blocks)
            _put_by_age(self.running, fork)
        return forks

    def _make_room(self, sequence: Sequence, plan: Plan) -> bool:
        """Gives the sequence a block of its own for its next token; False if it had to give way itself."""
        index = sequence.computed // self.cache.block_size
        fresh = index == len(sequence.blocks)
        if not fresh and not self.cache.is_shared(sequence.blocks[index]):
            return True
        while (taken := self.cache.take(1)) is None:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if fresh:
            sequence.blocks += taken
            plan.fresh += taken
        elif self.cache.is_shared(sequence.blocks[index]):
            plan.copies.append((sequence.blocks[index], taken[0]))
            self.cache.release([sequence.blocks[index]])
            sequence.blocks[index] = taken[0]
        else:  # whoever shared it has just given way
            self.cache.release(taken)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.add(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._places -= sequence.copies
        self.cache.release(sequence.blocks)
        sequence.forget_blocks()
        sequence.running = False

    def _has_place(self, sequence: Sequence) -> bool:
        return not self.running or self._places + sequence.copies <= self.max_sequences

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Gives a waiting sequence all the blocks its tokens need, if there is room for it."""
        group, cache = sequence.group, self.cache
        if not self._has_place(sequence):
            return False
        # The last token is always read again, for its logits; so is whatever the prompt's scores need.
        limit = len(sequence.tokens) - 1 if sequence.scores is None else sequence.scores.first - 1
        blocks, digest = cache.lookup(group.policy, sequence.tokens, limit)
        need = cache.blocks_for(len(sequence.tokens)) - len(blocks)
        # One more block for each that runs, or it would soon have to give way again.
        spare = self._places + sequence.copies - 1 if self.running else 0
        taken = cache.take(need) if need + spare <= cache.available else None
        if taken is None:
            cache.release(blocks)
            return False
        plan.fresh += taken
        sequence.blocks, sequence.digest, sequence.published = blocks + taken, digest, len(blocks)
        sequence.computed = len(blocks) * cache.block_size
        if group.cached_tokens is None:
            group.cached_tokens = sequence.computed
        return True

    def _start(self) -> Sequence:
        sequence = self.waiting.pop(0)
        sequence.running = True
        self._places += sequence.copies
        _put_by_age(self.running, sequence)
        return sequence


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


def _put_by_age(sequences: list[Sequence], sequence: Sequence) -> None:
    if sequences and sequences[-1].arrival > sequence.arrival:
        insort(sequences, sequence, key=_age)
    else:  # the youngest, as most are
        sequences.append(sequence)


def _left_after(work: Work) -> int:
    """Tokens the sequence may draw once the work is done."""
    return work.sequence.group.max_tokens - work.sequence.drawn - work.steps


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.pending == 1 and sequence.copies == 1


def _has_read(sequence: Sequence) -> bool:
    """It decodes, or will when it gets the token it is drawing."""
    return sequence.pending <= 1 and sequence.copies == 1
