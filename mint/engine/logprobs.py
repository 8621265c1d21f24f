"""Log-probs of target tokens straight from hidden states, in chunks: no [tokens, vocabulary] tensor, forward or back.

Shapes: T tokens, H hidden size, K targets a token, V vocabulary, N tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mint.engine.lora import UNEMBEDDING, Adapter
from mint.engine.model import BaseModel

# Logits of one chunk: 64 MiB of float32 on a CPU, about 110 tokens of a 152k vocabulary, enough to keep the matrix
# product efficient; on a GPU 512 MiB, so that the product and not the launch takes the time.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}


def target_logprobs(
    model: BaseModel, adapter: Adapter | None, hidden_TH: Tensor, targets_TK: Tensor, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) at the targets, [T, K] in float32; differentiable in the hidden states and in
    the unembedding's adapter."""
    pair = adapter.weights.get(UNEMBEDDING, ()) if adapter is not None else ()
    return _TargetLogprobs.apply(model, adapter, temperature, targets_TK, hidden_TH, *pair)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        model: BaseModel,
        adapter: Adapter | None,
        temperature: float,
        targets_TK: Tensor,
        hidden_TH: Tensor,
        *pair: Tensor,
    ) -> Tensor:
        normalizers, chosen = [], []
        for chunk in _chunks(model, len(hidden_TH)):
            logits_NV = model.logits(hidden_TH[chunk], [(adapter, chunk.stop - chunk.start)]).div_(temperature)
            normalizers.append(torch.logsumexp(logits_NV, dim=1, keepdim=True))
            chosen.append(logits_NV.gather(1, targets_TK[chunk]))
        normalizer_T1 = torch.cat(normalizers)
        ctx.model, ctx.adapter, ctx.temperature = model, adapter, temperature
        ctx.save_for_backward(targets_TK, hidden_TH, normalizer_T1, *pair)
        return torch.cat(chosen) - normalizer_T1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TK,) = grads
        targets_TK, hidden_TH, normalizer_T1, *pair = ctx.saved_tensors
        # Prompts and other tokens without a say in the loss take no part.
        live = grad_TK.ne(0).any(dim=1).nonzero().squeeze(1)
        hidden_grad_TH = torch.zeros_like(hidden_TH)
        pair_grads = [torch.zeros_like(weight) for weight in pair]
        for chunk in _chunks(ctx.model, len(live)):
            rows = live[chunk]
            hidden_NH = hidden_TH[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits_NV = ctx.model.logits(hidden_NH, [(ctx.adapter, len(rows))])
            grad_NK = grad_TK[rows]
            # d logprob_k / d logit_v = (v is target k) - softmax_v
            grad_NV = (logits_NV.detach() / ctx.temperature).sub_(normalizer_T1[rows]).exp_()
            grad_NV.mul_(-grad_NK.sum(dim=1, keepdim=True)).scatter_add_(1, targets_TK[rows], grad_NK)
            grad_NV.div_(ctx.temperature)
            hidden_grad_NH, *found = torch.autograd.grad(logits_NV, [hidden_NH, *pair], grad_NV)
            hidden_grad_TH[rows] = hidden_grad_NH
            for total, part in zip(pair_grads, found, strict=True):
                total.add_(part)
        return None, None, None, None, hidden_grad_TH, *pair_grads


def _chunks(model: BaseModel, tokens: int) -> Iterator[slice]:
    size = max(1, CHUNK_LOGITS.get(model.device.type, CHUNK_LOGITS["cpu"]) // model.facts.vocab_size)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
