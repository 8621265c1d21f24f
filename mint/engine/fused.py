"""A decoder's layers with fused projections, for sampling: q, k and v in one product, gate and up in one.

The families of `FAMILIES` share one layer: norm, attention with rotary embedding (norms on q and k, biases and windows
where a family has them), norm, gated MLP; in Gemma 3 what each half adds has a norm as well. `FusedDecoder.of`
recognises them, lays the weights of each fused projection side by side and makes the linears of the transformers
modules views of them, so that training goes on with the same storage; then it compares itself with those modules on a
few tokens, and a model that is anything else stays as it is.
`hidden` is the pass in plain torch, for any device; the pass in kernels of its own (`mint.engine.sampler.kernel_pass`)
uses the same weights.

Rows: the tokens of a pass stand in runs of one adapter, each run filled up to `multiple` rows (see `padded`).

Shapes: T rows, H query heads, K key/value heads, D head size, I a projection's inputs, O its outputs, R rank.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.attention import Attend, PackedAttention
from mint.engine.lora import UNEMBEDDING, Adapter, LoraLinear, Rows

if TYPE_CHECKING:
    from mint.engine.model import BaseModel

FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"}
# The gates there are: x / (1 + e^-z), with z = x or, for GELU by tanh, a cubic of x.
SILU, GELU = "silu", "gelu_pytorch_tanh"
# Rotary embeddings whose frequencies do not depend on the length of the sequence.
FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}

# Rows left free below the weights of each linear on a GPU, for the A of an adapter up to this rank, so that both are
# one product; beside the unembedding, whose outputs are many, as many columns for its B.
ROOM = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Projection:
    """Linears with one input, their weights below one another."""

    weight_OI: Tensor
    bias_O: Tensor | None
    paths: tuple[str, ...]
    """The linears, as adapters name them..."""
    sizes: tuple[int, ...]
    """...and how many of the outputs are each one's."""
    roomy_OI: Tensor | None = None
    """The weights with ROOM rows for each linear below them, where there is such room..."""
    roomy_bias_O: Tensor | None = None
    """...and the bias with as many zeros."""
    wide_OX: Tensor | None = None
    """The weights of a single linear with ROOM columns beside them, where there is such room."""


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Projection
    head_norm: Tensor | None
    """Of every query and key head, [H + K, D]; None where the family has none."""
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    window: int | None
    rotary: tuple[Tensor, Tensor]
    """Cosine and sine of every position, [positions, D]."""
    attention_norm: Tensor | None = None
    """Of what attention adds to the residual stream..."""
    gated_norm: Tensor | None = None
    """...and of what the MLP adds; None where the family has none."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class FusedDecoder:
    def __init__(self, model: BaseModel, decoder: Any) -> None:
        config = decoder.config
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.scale: float = decoder.layers[0].self_attn.scaling
        self.eps: float = config.rms_norm_eps
        self.act: str = _act_of(config)
        self.wide_norms = hasattr(decoder.layers[0], "pre_feedforward_layernorm")
        """Norms are multiplied in float32, with weights that are stored less 1 and held here as they are meant."""
        self.embedding = decoder.embed_tokens.weight
        scale = getattr(decoder.embed_tokens, "embed_scale", None)
        self.embedding_scale = 1.0 if scale is None else float(scale.to(self.embedding.dtype))
        self.final_norm = self._weight_of(decoder.norm)
        linears = model.linears
        room = ROOM if model.device.type == "cuda" else 0
        self.unembedding = _widen(UNEMBEDDING, linears[UNEMBEDDING], room)
        names = {id(linear): path for path, linear in linears.items()}

        def fuse(*parts: LoraLinear) -> Projection:
            return _fuse([(names[id(part)], part) for part in parts], room)

        rotary = _Rotary(decoder, model)
        self.layers: list[Layer] = []
        for number, (layer, window) in enumerate(zip(decoder.layers, model.windows, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            before_mlp = layer.pre_feedforward_layernorm if self.wide_norms else layer.post_attention_layernorm
            self.layers.append(
                Layer(
                    input_norm=self._weight_of(layer.input_layernorm),
                    qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj),
                    head_norm=self._head_norm(attention),
                    out=fuse(attention.o_proj),
                    mlp_norm=self._weight_of(before_mlp),
                    gate_up=fuse(mlp.gate_proj, mlp.up_proj),
                    down=fuse(mlp.down_proj),
                    window=window,
                    rotary=rotary.of_layer(number),
                    attention_norm=self._weight_of(layer.post_attention_layernorm) if self.wide_norms else None,
                    gated_norm=self._weight_of(layer.post_feedforward_layernorm) if self.wide_norms else None,
                )
            )
        self._pairs: WeakKeyDictionary[Adapter, dict[str, tuple[Tensor, Tensor] | None]] = WeakKeyDictionary()

    @classmethod
    @torch.no_grad()
    def of(cls, model: BaseModel, module: Any) -> FusedDecoder | None:
        """None for a model of another family, or one that computes something else than its family does."""
        config, decoder = module.config.get_text_config(), module.get_decoder()
        if type(module).__name__ not in FAMILIES or _act_of(config) not in (SILU, GELU) or model.softcap is not None:
            return None
        if not has_fixed_rotary(decoder) or model.head_dim % 2:
            return None
        fused = cls(model, decoder)
        tokens_T = torch.arange(8, device=model.device) % model.facts.vocab_size
        rows: Rows = [(None, 8)]
        theirs = model.hidden(tokens_T, tokens_T, PackedAttention([8]), rows)
        ours = fused.hidden(tokens_T, tokens_T, PackedAttention([8]), rows)
        tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
        if not float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max()):
            log.warning("%s differs from the layers of its family; it is sampled without fused ones", model.facts.name)
            return None
        return fused

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, rows: Rows) -> Tensor:
        """The final hidden states, after the last norm."""
        heads, kv = self.num_heads, self.num_kv_heads
        both, half = heads + kv, self.head_dim // 2
        x = self.embed(tokens_T)
        for number, layer in enumerate(self.layers):
            cos_T1D, sin_T1D = (table_PD[positions_T][:, None] for table_PD in layer.rotary)
            qkv = self._project(layer.qkv, self._norm(x, layer.input_norm), rows).unflatten(1, (both + kv, -1))
            qk, v_TKD = qkv[:, :both], qkv[:, both:]
            if layer.head_norm is not None:
                qk = self._norm(qk, layer.head_norm)
            turned = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
            qk = qk * cos_T1D + turned * sin_T1D
            seen = attend(number, qk[:, :heads], qk[:, heads:], v_TKD, self.scale, layer.window)
            added = self._project(layer.out, seen.flatten(1), rows)
            x = x + (added if layer.attention_norm is None else self._norm(added, layer.attention_norm))
            gate, up = self._project(layer.gate_up, self._norm(x, layer.mlp_norm), rows).chunk(2, dim=1)
            opened = F.silu(gate) if self.act == SILU else F.gelu(gate, approximate="tanh")
            added = self._project(layer.down, opened * up, rows)
            x = x + (added if layer.gated_norm is None else self._norm(added, layer.gated_norm))
        return self._norm(x, self.final_norm)

    def embed(self, tokens_T: Tensor) -> Tensor:
        x = F.embedding(tokens_T, self.embedding)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def logits(self, hidden_TH: Tensor, rows: Rows) -> Tensor:
        """In float32."""
        return self._project(self.unembedding, hidden_TH, rows).float()

    def _head_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        q, k = self._weight_of(attention.q_norm), self._weight_of(attention.k_norm)
        return torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)))

    def _weight_of(self, norm: Any) -> Tensor:
        return 1 + norm.weight.float() if self.wide_norms else norm.weight

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.wide_norms:
            return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * weight).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * weight

    def _project(self, projection: Projection, x_TI: Tensor, rows: Rows) -> Tensor:
        out_TO = F.linear(x_TI, projection.weight_OI, projection.bias_O)
        start = 0
        for adapter, count in rows:
            if adapter is not None and (pair := self.pair(adapter, projection)) is not None:
                down_RI, up_RO = pair
                x, out = (x_TI, out_TO) if count == len(x_TI) else (t[start : start + count] for t in (x_TI, out_TO))
                out.addmm_(x @ down_RI.T, up_RO)
            start += count
        return out_TO

    def pair(self, adapter: Adapter, projection: Projection) -> tuple[Tensor, Tensor] | None:
        """The adapter's matrices for all linears of the projection at once, its scale in the second: every linear's A
        below the others', and their B in blocks. None if it has no linear there."""
        pairs = self._pairs.setdefault(adapter, {})
        key = projection.paths[0]
        if key not in pairs:
            pairs[key] = joined(adapter, projection)
        return pairs[key]


def padded(rows: Sequence[tuple[Adapter | None, int]], multiple: int) -> tuple[Rows, list[int]]:
    """Runs filled up to whole multiples, and where each of the tokens given now stands."""
    runs: list[tuple[Adapter | None, int]] = []
    places: list[int] = []
    start = 0
    for adapter, count in rows:
        places.extend(range(start, start + count))
        whole = -(-count // multiple) * multiple
        runs.append((adapter, whole))
        start += whole
    return runs, places


def _fuse(parts: list[tuple[str, LoraLinear]], room: int) -> Projection:
    paths, linears = zip(*parts, strict=True)
    sizes = tuple(linear.out_features for linear in linears)
    outputs, rows = sum(sizes), room * len(linears)
    bias_O = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    if outputs + rows == len(linears[0].weight):
        return Projection(linears[0].weight, bias_O, paths, sizes)
    roomy_OI = linears[0].weight.new_zeros(outputs + rows, linears[0].in_features)
    for linear, part in zip(linears, roomy_OI[:outputs].split(sizes), strict=True):
        part.copy_(linear.weight)
        linear.weight.data = part
    roomy_bias_O = None if bias_O is None else F.pad(bias_O, (0, rows))
    return Projection(roomy_OI[:outputs], bias_O, paths, sizes, roomy_OI if rows else None, roomy_bias_O)


def _widen(path: str, linear: LoraLinear, room: int) -> Projection:
    if not room:
        return _fuse([(path, linear)], 0)
    wide_OX = F.pad(linear.weight.data, (0, room))
    linear.weight.data = wide_OX[:, : linear.in_features]
    return Projection(linear.weight, linear.bias, (path,), (linear.out_features,), wide_OX=wide_OX)


def joined(adapter: Adapter, projection: Projection) -> tuple[Tensor, Tensor] | None:
    held = [(n, adapter.weights[path]) for n, path in enumerate(projection.paths) if path in adapter.weights]
    if not held:
        return None
    dtype = projection.weight_OI.dtype
    rank = adapter.config.rank
    starts = [sum(projection.sizes[:n]) for n in range(len(projection.sizes))]
    down_RI = torch.cat([a.detach().to(dtype) for _, (a, _) in held])
    up_RO = down_RI.new_zeros(len(down_RI), sum(projection.sizes))
    for place, (n, (_, b)) in enumerate(held):
        columns = slice(starts[n], starts[n] + projection.sizes[n])
        up_RO[place * rank : (place + 1) * rank, columns] = (adapter.scale * b.detach().float()).T.to(dtype)
    return down_RI, up_RO


def has_fixed_rotary(decoder: Any) -> bool:
    types = getattr(decoder.rotary_emb, "rope_type", None)  # one, or one for each type of layer
    return FIXED_ROTARY.issuperset(types.values() if isinstance(types, dict) else [types])


def rotary_types(decoder: Any) -> list[str | None]:
    """By which its rotary embedding tells layers apart; None where all are alike."""
    by_type = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
    return list(decoder.config.layer_types) if by_type else [None] * len(decoder.layers)


class _Rotary:
    """Cosine and sine of every position, [positions, D], as the family rounds them; layers of one type share them."""

    @torch.no_grad()
    def __init__(self, decoder: Any, model: BaseModel) -> None:
        positions = torch.arange(model.facts.max_context + 1, device=model.device)[None]
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._types = rotary_types(decoder)
        self._tables = {}
        for kind in dict.fromkeys(self._types):
            cos, sin = decoder.rotary_emb(like, positions, *([] if kind is None else [kind]))
            self._tables[kind] = cos[0], sin[0]

    def of_layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self._tables[self._types[number]]


def _act_of(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", SILU))
