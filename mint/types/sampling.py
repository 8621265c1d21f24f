"""One call of `sample`: what it asks for and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mint.types.model_input import ModelInput
from mint.types.params import SamplingParams
from mint.types.tensors import TensorData

StopReason = Literal["stop", "length"]
TopkRow = list[tuple[int, float]]


@dataclass(frozen=True)
class SampleRequest:
    """Everything one call of `sample` asks for, apart from whom it asks."""

    prompt: ModelInput
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    """[len(prompt) - 1, K] token ids to score at every position after the first; -1 skips a cell."""
    prompt_alt_tokens_k: int = 0
    """Draws per prompt position after the first."""
    prompt_logprobs_last_n: int | None = None
    """Score only the last n prompt tokens; earlier ones come back as None."""


@dataclass(frozen=True)
class SampledSequence:
    """One completion: the generated ids, the stop token included if one ended it, and never the prompt."""

    tokens: list[int]
    logprobs: list[float] | None
    """Log-probability of each token under the policy itself (temperature 1, nothing truncated), whatever the sampling
    parameters were: what `forward` gives for the same weights. See docs/sampling.md for why."""
    stop_reason: StopReason
    sequence_id: str | None = None
    topk_logprobs: list[TopkRow] | None = None

    @property
    def tokens_np(self) -> np.ndarray:
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> np.ndarray | None:
        return None if self.logprobs is None else np.asarray(self.logprobs, dtype=np.float32)


@dataclass(frozen=True)
class PromptAltTokens:
    """Draws at each prompt position after the first: two [len(prompt) - 1, k] tensors."""

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True)
class SampleResponse:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """One entry a prompt token; None where not scored (the first token has no log-prob)."""
    topk_prompt_logprobs: list[TopkRow | None] | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
