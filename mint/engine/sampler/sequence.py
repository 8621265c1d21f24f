"""What is in flight: a `Group` is one sample request, a `Sequence` one of its samples.

Plain data that travels between scheduler, runner and sampler; who runs, where keys and values lie and how tokens are
drawn is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mint.backend import OnTokens
from mint.errors import MintError
from mint.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams, TopkRow

if TYPE_CHECKING:
    from mint.engine.lora import Adapter
    from mint.engine.sampler.grammar import Grammar, Guide
    from mint.engine.sampler.scoring import PromptScores
    from mint.engine.sampler.stops import StopText

OnDone = Callable[[SampleResponse | MintError], None]


@dataclass(eq=False, slots=True)
class Group:
    """A request and what its samples have in common."""

    request: SampleRequest
    prompt: list[int]
    adapter: Adapter | None
    policy: int
    """The adapter as a number: equal numbers may share cached prefixes and lie in one run of rows."""
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    arrival: int
    on_done: OnDone
    on_tokens: OnTokens | None
    tokenizer: Any = None
    """There to decode, if there are stop strings."""
    grammar: Grammar | None = None
    """What its answers have to follow."""
    scores: PromptScores | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the cache; None until the prompt was first looked up."""
    samples: dict[int, SampledSequence] = field(default_factory=dict)
    done: bool = False

    @property
    def urgent(self) -> bool:
        """The engine's own business, ahead of all that was asked for and not counted with it."""
        return self.arrival < 0

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def plain(self) -> bool:
        """Draws from the whole distribution as it is, and nothing but the draw is asked for."""
        return not self.filtered and self.bursts

    @property
    def filtered(self) -> bool:
        """Draws from a part of the distribution."""
        params = self.request.sampling_params
        return params.top_k != -1 or params.top_p < 1 or params.min_p > 0

    @property
    def bursts(self) -> bool:
        """Nothing but tokens and their log-probs is asked for, and no draw depends on those before it but through the
        model, so that several may be drawn before anybody looks."""
        return not self.request.topk_sample_logprobs and not self.steered

    @property
    def steered(self) -> bool:
        """Its logits are moved before a draw (see `steering`)."""
        return self.request.sampling_params.steers


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample; until its prompt has been read, also the `copies - 1` that follow it in its group."""

    group: Group
    index: int
    copies: int
    stream: int
    """Its own random stream."""
    tokens: list[int]
    """The prompt and what has been drawn."""
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopkRow] = field(default_factory=list)
    stop_text: StopText | None = None
    guide: Guide | None = None
    """Where it is in the group's grammar."""

    running: bool = False
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    """How many of its blocks, from the first, are full and known to the prefix cache..."""
    digest: bytes = b""
    """...and the key of the last of those."""

    @property
    def arrival(self) -> tuple[int, int]:
        """Lower is older."""
        return self.group.arrival, self.index

    @property
    def pending(self) -> int:
        """Tokens still to be read before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def drawn(self) -> int:
        return len(self.logprobs)

    @property
    def scores(self) -> PromptScores | None:
        """Where to write the scores of the prompt, as long as this sequence is the one that reads it."""
        return self.group.scores if self.index == 0 and not self.logprobs else None

    def fork(self, index: int, stream: int) -> Sequence:
        """Another sample of the same prompt, sharing its blocks."""
        return replace(
            self, index=index, stream=stream, copies=1, tokens=list(self.tokens), blocks=list(self.blocks),
            logprobs=[], topk=[], stop_text=None, guide=None,
        )  # fmt: skip

    def forget_blocks(self) -> None:
        self.computed, self.blocks, self.published, self.digest = 0, [], 0, b""
