"""What a request wants to know about its prompt: log-probs, top-k, given targets, draws.

Filled in as the prompt is read. Position p of a prompt is scored by the logits of the token before it; position 0 has
none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mint.engine.sampler.logits import invert, logprobs_of, temper, topk_rows
from mint.engine.sampler.streams import stream_of, uniforms
from mint.types import PromptAltTokens, SampleRequest, SampleResponse, TensorData, TopkRow

# Draws at prompt positions use streams of their own, far from those of the samples 0, 1, 2...
ALT_STREAM = 2**40


class PromptScores:
    def __init__(self, request: SampleRequest, prompt: list[int], seed: int) -> None:
        self._request = request
        self._prompt = prompt
        self._seed = seed
        count, k = len(prompt), request.prompt_alt_tokens_k
        last_n = request.prompt_logprobs_last_n
        self._logprobs_from = 1 if last_n is None else max(1, count - last_n)
        wants_all = request.target_prompt_logprobs is not None or k > 0
        self.first = 1 if wants_all else self._logprobs_from
        """The first position that has to be scored."""
        self._logprobs: list[float | None] = [None] * count
        self._topk: list[TopkRow | None] = [None] * count
        targets = request.target_prompt_logprobs
        self._targets = None if targets is None else targets.to_numpy()
        self._target_logprobs = None if targets is None else np.zeros(targets.shape, dtype=np.float32)
        self._alt_tokens = np.zeros((count - 1, k), dtype=np.int64)
        self._alt_logprobs = np.zeros((count - 1, k), dtype=np.float32)

    @staticmethod
    def wanted(request: SampleRequest) -> bool:
        return bool(
            request.prompt_logprobs
            or request.topk_prompt_logprobs
            or request.target_prompt_logprobs is not None
            or request.prompt_alt_tokens_k
        )

    def positions(self, start: int, stop: int) -> range:
        """Of the prompt tokens start..stop-1 that a step reads: the positions their logits are to score."""
        return range(max(start + 1, self.first), min(stop + 1, len(self._prompt)))

    def write(self, positions: range, logits_NV: Tensor) -> None:
        """Scores the positions; row i of the logits belongs to positions[i]."""
        request, device = self._request, logits_NV.device
        skip = max(0, self._logprobs_from - positions.start)
        if request.prompt_logprobs and skip < len(positions):
            ids_N1 = torch.tensor(self._prompt[positions.start + skip : positions.stop], device=device)[:, None]
            scored = logprobs_of(logits_NV[skip:], ids_N1)[:, 0].tolist()
            self._logprobs[positions.start + skip : positions.stop] = scored
        if request.topk_prompt_logprobs and skip < len(positions):
            rows = topk_rows(logits_NV[skip:], request.topk_prompt_logprobs)
            self._topk[positions.start + skip : positions.stop] = rows
        cells = slice(positions.start - 1, positions.stop - 1)
        if self._targets is not None and self._target_logprobs is not None:
            ids_NK = torch.from_numpy(self._targets[cells]).to(device)
            scored_NK = logprobs_of(logits_NV, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, 0.0)
            self._target_logprobs[cells] = scored_NK.cpu().numpy()
        if request.prompt_alt_tokens_k:
            self._draw(positions, cells, logits_NV)

    def _draw(self, positions: range, cells: slice, logits_NV: Tensor) -> None:
        """Draws at the request's temperature from the whole distribution, as the protocol has it."""
        shape = (len(positions), self._request.prompt_alt_tokens_k)
        temperature = self._request.sampling_params.temperature
        if temperature == 0:
            ids_NK = logits_NV.argmax(-1, keepdim=True).expand(shape)
        else:
            streams = [stream_of(self._seed, ALT_STREAM + k) for k in range(shape[1])]
            stream_NK = np.broadcast_to(np.array(streams, dtype=np.uint64), shape)
            uniform_NK = uniforms(stream_NK, np.broadcast_to(np.asarray(positions)[:, None], shape))
            scaled_NV = temper(logits_NV, np.full(len(positions), temperature))
            ids_NK = invert(scaled_NV.softmax(-1), uniform_NK)
        self._alt_tokens[cells] = ids_NK.cpu().numpy()
        self._alt_logprobs[cells] = logprobs_of(logits_NV, ids_NK).cpu().numpy()

    def into(self, response: SampleResponse) -> SampleResponse:
        """The response with the scores that were asked for."""
        request, targets = self._request, self._target_logprobs
        tokens, logprobs = TensorData(self._alt_tokens, "int64"), TensorData(self._alt_logprobs, "float32")
        return replace(
            response,
            prompt_logprobs=self._logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=self._topk if request.topk_prompt_logprobs else None,
            target_prompt_logprobs=None if targets is None else TensorData(targets, "float32"),
            prompt_alt_tokens=PromptAltTokens(tokens, logprobs) if request.prompt_alt_tokens_k else None,
        )
