"""The base model: loaded once, frozen, and called on packed rows of tokens.

The layers are transformers'; around them stand our attention (`mint.engine.attention`) and our linears
(`mint.engine.lora`). Finding the files of a model lives in `mint.engine.hub`.

Shapes: T packed tokens, N rows of hidden states, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from mint.backend import ModelFacts
from mint.engine import steady
from mint.engine.attention import IMPLEMENTATION, Attend, PackedAttention
from mint.engine.device import Device, choose_threads, pick_device
from mint.engine.fused import FusedDecoder
from mint.engine.hub import find_folder
from mint.engine.layer_parts import Owners
from mint.engine.layers import FusedLayers, low_ranks
from mint.engine.lora import UNEMBEDDING, Adapter, CurrentRows, LoraLinear, Rows, group_of
from mint.engine.native.library import prepare
from mint.engine.native.training import NativeTraining
from mint.engine.native.weights import PackedWeights
from mint.engine.shared_attention import FlashLayout, TreeAttention
from mint.engine.stack import Stack
from mint.engine.tree import Tree, grow
from mint.errors import BadRequest, NotFound
from mint.types import LoraConfig

log = logging.getLogger(__name__)


class BaseModel:
    """The weights of one base model, shared by every adapter, by training and by sampling."""

    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: list[int | None]
    """The sliding window of each layer; None looks at everything before."""
    linears: dict[str, LoraLinear]
    """Every linear an adapter may sit on, by its path in the transformers model."""

    def __init__(self, name: str, folder: Path, module: Any, device: Device) -> None:
        """`module` is a transformers causal LM whose attention is ours; its linears are replaced here."""
        config = module.config.get_text_config()
        self.device, self.dtype = device.torch_device, device.dtype
        self.bfloat16_products = device.bfloat16_products
        """As in `Device`."""
        self._module = module.to(device.torch_device).eval().requires_grad_(False)
        self._decoder = module.get_decoder()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._row_multiple = steady.row_multiple(self.device, self.dtype)
        self.fixed_rows = steady.FIXED_ROWS if device.steady and device.torch_device.type == "cuda" else None
        """Rows of every matrix product of the sampler, where that was asked for (see `steady`)."""
        self._current = CurrentRows(self._row_multiple)
        self.hidden_size: int = config.hidden_size
        self._threads = choose_threads(self.hidden_size).count if self.device.type == "cpu" else None
        self.intermediate_size: int = config.intermediate_size
        self._read_attention(config)
        parameters = module.num_parameters()
        self.facts = ModelFacts(
            name=name,
            folder=str(folder),
            architecture=type(module).__name__,
            vocab_size=module.get_input_embeddings().weight.shape[0],
            max_context=config.max_position_embeddings,
            parameters=parameters,
            dtype="bfloat16" if device.bfloat16_products else str(device.dtype).removeprefix("torch."),
            device=str(device.torch_device),
        )
        self.linears = _wrap_linears(module, self._decoder, self._current)
        self._check_family()
        self._fused = self._read_layers()

    @classmethod
    def load(cls, name: str, device: Device | None = None) -> BaseModel:
        """A bundled model (`mint/tiny`), a local folder, or a Hub id from the cache or, if need be, the network."""
        device = device or pick_device()
        if device.torch_device.type == "cpu" and device.dtype == torch.float32:
            steady.ask_for_strict_sums()
            prepare()  # the native code, compiled meanwhile if need be
        folder = find_folder(name)
        dtype = torch.bfloat16 if device.bfloat16_products else device.dtype
        module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
        if not device.bfloat16_products:
            return cls(name, folder, module, device)
        model = cls(name, folder, module.float(), device)  # rounded once, and computed with in float32
        model._check_products()
        return model

    def use_threads(self, count: int | None = None) -> None:
        """torch keeps the number by thread: whoever computes says it first. Always the same for a model and a purpose,
        whichever others are loaded, because sums may be split among threads."""
        wanted = count or self._threads
        if self.device.type == "cpu" and wanted is not None and torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, rows: Rows) -> Tensor:
        """The final hidden states [T, H], after the last norm."""
        count = len(tokens_T)
        if extra := -count % self._row_multiple:
            tokens_T, positions_T = (steady.pad_rows(x, self._row_multiple) for x in (tokens_T, positions_T))
            rows, attend = [*rows, (rows[-1][0], extra)], _of_first(count, attend, self._row_multiple)
        self._current.set(rows, len(tokens_T))
        out = self._decoder(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, attend=attend)
        return out.last_hidden_state[0, :count]

    def hidden_of_tree(
        self, tokens_T: Tensor, positions_T: Tensor, layout: Tree | FlashLayout, adapter: Adapter | Stack | None,
        lean: bool, owners: Owners | None = None,
    ) -> Tensor:  # fmt: skip
        """The final hidden states [T, H] for training; `lean` as in `Trainer`, where the layers are ours. `owners`: for
        a stack of adapters."""
        if isinstance(adapter, Stack):
            assert self._fused is not None and owners is not None
            return self._fused(tokens_T, positions_T, layout, adapter.low_ranks(owners), lean)
        if self._fused is None:
            assert isinstance(layout, Tree)
            return self.hidden(tokens_T, positions_T, TreeAttention(layout, self.device), [(adapter, len(tokens_T))])
        return self._fused(tokens_T, positions_T, layout, low_ranks(adapter, self.dtype), lean)

    @property
    def trains_filled(self) -> bool:
        """Whether `hidden_of_tree` wants a `FlashLayout`..."""
        return self._fused is not None and self._fused.flash

    @property
    def trains_recorded(self) -> bool:
        """...and its pass can be recorded, as nothing in it is decided on the CPU."""
        return self._fused is not None and self._fused.flash and self._fused.fixed_rotary

    @property
    def trains_shared(self) -> bool:
        """Whether several adapters may share a pass. Not where results are asked to be steady: sums would depend on who
        else is there."""
        return self.trains_recorded and self.fixed_rows is None

    @property
    def trains_side_by_side(self) -> bool:
        """Whether several training passes may be under way at once: modules know one pass at a time."""
        if self.native_training is not None:
            return True
        fused = self._fused
        return self.device.type == "cpu" and fused is not None and fused.fixed_rotary and not fused.flash

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        """Logits [N, V] in float32, the unembedding's adapter and the family's softcap included."""
        count = len(hidden_NH)
        padded_NH = steady.pad_rows(hidden_NH, self._row_multiple)
        with self._current.instead([*rows, (rows[-1][0], len(padded_NH) - count)], len(padded_NH)):
            logits_NV = self.linears[UNEMBEDDING](padded_NH)[:count].float()
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    @cached_property
    def fused(self) -> FusedDecoder | None:
        """The layers with fused projections, for the families that have them."""
        self.use_threads()
        return FusedDecoder.of(self, self._module)

    @cached_property
    def packed(self) -> PackedWeights | None:
        """The weights as native code reads them; None where sampling and training go through torch."""
        return PackedWeights.of(self)

    @cached_property
    def native_training(self) -> NativeTraining | None:
        return None if self.packed is None else NativeTraining(self.packed)

    def weights_changed(self) -> None:
        """To be told by whoever gives a linear another weight: copies of the old one are forgotten."""
        for name in ("fused", "packed", "native_training"):
            self.__dict__.pop(name, None)

    def new_adapter(self, config: LoraConfig) -> Adapter:
        return Adapter.create(self.facts.name, self.linears, config)

    @property
    def has_tokenizer(self) -> bool:
        names = ("tokenizer.json", "tokenizer_config.json")
        return any((Path(self.facts.folder) / name).exists() for name in names)

    @cached_property
    def tokenizer(self) -> Any:
        if not self.has_tokenizer:
            raise NotFound(f"{self.facts.folder} holds no tokenizer (tokenizer.json or tokenizer_config.json).")
        return AutoTokenizer.from_pretrained(self.facts.folder, local_files_only=True)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a sequence, by the generation settings, the model's or the tokenizer's."""
        given = [self._module.generation_config.eos_token_id, self._module.config.get_text_config().eos_token_id]
        if self.has_tokenizer:
            given.append(self.tokenizer.eos_token_id)
        return frozenset(id for ids in given for id in ([ids] if isinstance(ids, int) else ids or []))

    def _read_attention(self, config: Any) -> None:
        layers = [m for m in self._decoder.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
        layers.sort(key=lambda layer: layer.layer_idx)
        self.num_layers = config.num_hidden_layers
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dims = {layer.head_dim for layer in layers}
        if len(layers) != self.num_layers or len(head_dims) != 1:
            raise BadRequest(
                f"{type(self._module).__name__} does not have one attention of one head size in each of its "
                f"{self.num_layers} layers; this engine runs plain decoder-only attention models."
            )
        self.head_dim = head_dims.pop()
        self.windows = [getattr(layer, "sliding_window", None) for layer in layers]

    def _check_products(self) -> None:
        if self.packed is None:
            raise BadRequest(
                f"{self.facts.name} ({self.facts.architecture}) cannot be computed in bfloat16 on this CPU: that takes "
                "a C++ compiler and a model of the Llama, Qwen2, Qwen3 or Gemma 3 family, without softcaps, of up to "
                "4 GiB in float32. Serve it without --bfloat16."
            )
        if not self.packed.functions.mint_multiplies_pairs():
            log.warning("this processor has no instructions for bfloat16 (avx512_bf16): float32 is faster here")

    @torch.no_grad()
    def _check_family(self) -> None:
        """Two tokens through transformers' own forward and through ours: a family that does more to its logits than we
        know of is refused here, by name, rather than trained wrongly."""
        self.use_threads()
        tokens_T = torch.arange(2, device=self.device)
        rows: Rows = [(None, 2)]
        ours = self.logits(self.hidden(tokens_T, tokens_T, PackedAttention([2]), rows), rows)
        theirs = (
            self._module(
                input_ids=tokens_T[None], position_ids=tokens_T[None], use_cache=False, attend=PackedAttention([2])
            )
            .logits[0]
            .float()
        )
        if not self._close(ours, theirs):
            raise BadRequest(
                f"{type(self._module).__name__} computes its logits in a way this engine does not know "
                f"(they differ by {float((ours - theirs).abs().max()):.3g}); it cannot be trained faithfully here."
            )

    @torch.no_grad()
    def _read_layers(self) -> FusedLayers | None:
        """None for a family whose layers ours do not reproduce."""
        fused = FusedLayers.of(self._decoder, self.windows, flash=False)
        if fused is None:
            return None
        tree = grow([np.arange(8)])
        tokens_T = torch.arange(8, device=self.device)
        rows: Rows = [(None, 8)]
        theirs = self.logits(self.hidden(tokens_T, tokens_T, PackedAttention([8]), rows), rows)
        ours = self.logits(fused(tokens_T, tokens_T, tree, {}), rows)
        if not self._close(ours, theirs):
            return None
        half = self.device.type == "cuda" and self.dtype in (torch.float16, torch.bfloat16)
        return FusedLayers.of(self._decoder, self.windows, flash=half)

    def _close(self, ours: Tensor, theirs: Tensor) -> bool:
        tolerance = 1e-4 if self.dtype == torch.float32 else 0.05
        return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def _of_first(count: int, attend: Attend, multiple: int) -> Attend:
    """Attention for the first `count` of the padded tokens; the padding gets zeros."""

    def attend_to_real(
        layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        return steady.pad_rows(attend(layer, q_THD[:count], k_TKD[:count], v_TKD[:count], scale, window), multiple)

    return attend_to_real


def _wrap_linears(module: nn.Module, decoder: nn.Module, current: CurrentRows) -> dict[str, LoraLinear]:
    """Those of the decoder and the unembedding; a vision tower, say, keeps its own."""
    ours = set(decoder.modules()) | {getattr(module, UNEMBEDDING, None)}
    found = {path: m for path, m in module.named_modules() if isinstance(m, nn.Linear) and m in ours}
    if UNEMBEDDING not in found:
        raise BadRequest(f"{type(module).__name__} has no {UNEMBEDDING}; this engine runs causal language models.")
    linears = {}
    for path, linear in found.items():
        linears[path] = LoraLinear(linear, path, group_of(path), current)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, linears[path])
    return linears
