"""`Sampler`: requests in, tokens out. A step is schedule, run, postprocess, collect."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import count

from mint.backend import OnTokens
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler.cache import BlockCache
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.grammar import Grammar
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.requests import tokens_to_draw
from mint.engine.sampler.runners import runner_for
from mint.engine.sampler.scheduler import Plan, Scheduler
from mint.engine.sampler.scoring import PromptScores
from mint.engine.sampler.sequence import Group, OnDone, Sequence
from mint.engine.sampler.stops import StopText
from mint.engine.sampler.streams import stream_of
from mint.errors import Internal, MintError
from mint.types import SampledSequence, SampleRequest, SampleResponse, StopReason

# A request with more samples than this share of the places starts in several waves, so that it need not wait for an
# empty machine. Later waves find the prompt in the cache.
WAVE_SHARE = 4


class Sampler:
    def __init__(self, model: BaseModel, limits: Limits | None = None) -> None:
        self._model = model
        self._limits = limits = limits or Limits.of(model)
        self.cache = BlockCache(limits.block_size, limits.blocks, limits.max_blocks)
        self.runner = runner_for(model, limits.block_size)
        self.scheduler = Scheduler(self.cache, limits.token_budget, limits.max_sequences, self.runner.burst)
        self.tokens_sampled = 0
        self.tokens_read = 0
        self._arrivals = count(1)
        self._numbers = count(1)
        self._policies: dict[Adapter | None, int] = {None: 0}
        self._begun: tuple[Plan, Iterable[Drawn]] | None = None  # a step that is under way before its turn

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self,
        request: SampleRequest,
        adapter: Adapter | None,
        on_done: OnDone,
        on_tokens: OnTokens | None = None,
        urgent: bool = False,
        grammar: Grammar | None = None,
    ) -> Group:
        """Queues a request to the base model with the adapter, which must not change any more. `on_done` is called
        with the response or the error, during some later step; the returned group is what `cancel` wants. An `urgent`
        one goes before all that wait. `grammar`: the request's, compiled."""
        room = self._limits.max_blocks * self._limits.block_size
        max_tokens = tokens_to_draw(request, self._model.facts, room)
        params, prompt = request.sampling_params, request.prompt.to_ints()
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        eos = self._model.eos_ids if params.stops_at_eos else frozenset()
        if adapter not in self._policies:
            self._policies[adapter] = next(self._numbers)
        group = Group(
            request=request,
            prompt=prompt,
            adapter=adapter,
            policy=self._policies[adapter],
            max_tokens=max_tokens,
            stop_ids=eos | frozenset(params.stop_ids),
            seed=seed,
            arrival=-next(self._arrivals) if urgent else next(self._arrivals),
            on_done=on_done,
            on_tokens=on_tokens,
            tokenizer=self._model.tokenizer if params.stop_strings else None,
            grammar=grammar,
            scores=PromptScores(request, prompt, seed) if PromptScores.wanted(request) else None,
        )
        wave = max(1, self._limits.max_sequences // WAVE_SHARE)
        for first in range(0, request.num_samples, wave):
            copies = min(wave, request.num_samples - first)
            self.scheduler.add(Sequence(group, first, copies, stream_of(seed, first), list(prompt)))
        return group

    def step(self) -> bool:
        """Moves everything that runs on, by a token or a burst of them; whether there is more to do. Where the next
        step can do without this one's tokens it is begun first, so that the device never waits for the host."""
        self._model.use_threads()
        plan, drawn = self._begun or self._begin(self.scheduler.schedule())
        self.scheduler.commit(plan)
        following = self.scheduler.follow(plan)
        self._begun = self._begin(following) if following else None
        self.tokens_read += sum(work.count for work in plan.work if not work.sequence.group.urgent)
        for item in drawn:
            if item.sequence.running:  # otherwise it stopped in the step before, or its group was given up
                kept = self._append(item)
                self.tokens_sampled += 0 if item.sequence.group.urgent else kept
        if self._begun and not any(work.sequence.running for work in self._begun[0].work):
            self._begun = None
        return self.has_work

    def settle(self) -> None:
        """Waits for a step that is under way: whoever uses the device next need not."""
        if self._begun:
            plan, drawn = self._begun
            self._begun = plan, list(drawn)

    def _begin(self, plan: Plan) -> tuple[Plan, Iterable[Drawn]]:
        return plan, self.runner.run(plan)

    def cancel(self, group: Group) -> None:
        """Gives up the group's places; nobody is told. Fine for one that is already done."""
        if not group.done:
            group.done = True
            for sequence in [s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.group is group]:
                self.scheduler.remove(sequence)

    def abort(self, error: MintError, everything: bool = False) -> None:
        """After a step that failed: what ran in it fails with it, what waits can still go on, unless it is
        everything."""
        self._begun = None
        self.cache.forget_all()  # the step had promised blocks that were never written
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for group in {sequence.group for sequence in (running + waiting if everything else running or waiting)}:
            self._fail(group, error)

    def forget(self, adapter: Adapter) -> None:
        """The adapter will not be asked again: what was remembered for it can go. Its running requests go on."""
        if (policy := self._policies.pop(adapter, None)) is not None:
            self.cache.forget(policy)
            self.runner.forget(adapter)

    def _append(self, drawn: Drawn) -> int:
        """How many of the tokens are the sequence's: those behind a stop are nobody's."""
        sequence, group = drawn.sequence, drawn.sequence.group
        if any(map(math.isnan, drawn.logprobs)):
            self._fail(group, Internal("the policy's logits are not numbers: its training diverged. Go back."))
            return 0
        if sequence.guide and sequence.guide.fault:
            self._fail(group, sequence.guide.fault)
            return 0
        count, reason = self._until_stop(sequence, drawn.tokens)
        tokens, logprobs = drawn.tokens[:count], drawn.logprobs[:count]
        sequence.tokens += tokens
        sequence.logprobs += logprobs
        if k := group.request.topk_sample_logprobs:
            sequence.topk += [row[:k] for row in drawn.topk[:count]]
        if group.on_tokens:
            group.on_tokens(sequence.index, tokens, logprobs)
        if reason:
            self._finish(sequence, reason)
        return count

    def _until_stop(self, sequence: Sequence, tokens: list[int]) -> tuple[int, StopReason | None]:
        """How many of the tokens up to the first that ends the sequence, and why it does."""
        group = sequence.group
        if group.params.stop_strings or not group.stop_ids.isdisjoint(tokens):
            for count, token in enumerate(tokens, 1):
                if token in group.stop_ids or self._completes_stop(sequence, token):
                    return count, "stop"
        return len(tokens), "length" if sequence.drawn + len(tokens) >= group.max_tokens else None

    def _completes_stop(self, sequence: Sequence, token: int) -> bool:
        strings: Many[str] = sequence.group.params.stop_strings
        if not strings:
            return False
        if sequence.stop_text is None:
            sequence.stop_text = StopText(strings, sequence.group.tokenizer, sequence.group.prompt)
        return sequence.stop_text.push(token)

    def _finish(self, sequence: Sequence, reason: StopReason) -> None:
        group, request = sequence.group, sequence.group.request
        self.scheduler.remove(sequence)
        group.samples[sequence.index] = SampledSequence(
            tokens=sequence.tokens[len(group.prompt) :],
            logprobs=sequence.logprobs,
            stop_reason=reason,
            topk_logprobs=sequence.topk if request.topk_sample_logprobs else None,
        )
        if len(group.samples) == request.num_samples:
            group.done = True
            response = SampleResponse(
                sequences=[group.samples[i] for i in range(request.num_samples)],
                prompt_cache_hit_tokens=group.cached_tokens or 0,
            )
            group.on_done(group.scores.into(response) if group.scores else response)

    def _fail(self, group: Group, error: MintError) -> None:
        self.cancel(group)
        group.on_done(error)
