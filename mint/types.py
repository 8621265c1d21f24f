"""The vocabulary of MinT: the values that cross from one room to another.

Plain dataclasses over numpy, used alike by client, wire, server and engine. Names and fields are those of the Tinker
SDK, so `import mint as tinker` works; where the SDK drops or renames silently, these refuse by name. Encoding lives in
`mint.wire`, checks that need a model's facts in `mint.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mint.errors import BadRequest

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["float32", "int64"]
StopReason = Literal["stop", "length"]
CheckpointType = Literal["training", "sampler", "external"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
ModelID = str

# --------------------------------------------------------------------------------------------------------------------
# Model input


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)


ModelInputChunk = EncodedTextChunk


@dataclass(frozen=True)
class ModelInput:
    """The tokens a model reads: a list of chunks, of which text is the only kind this system has."""

    chunks: Sequence[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        if isinstance(tokens, str):
            raise BadRequest(f"from_ints takes token ids, got the text {tokens[:40]!r}; use tokenizer.encode(text).")
        return cls([EncodedTextChunk([int(t) for t in tokens])])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls([])

    def to_ints(self) -> list[int]:
        return [int(t) for chunk in self.chunks for t in chunk.tokens]

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([int(token)]))


# --------------------------------------------------------------------------------------------------------------------
# Tensors and training data


class TensorData:
    """A dense float32 or int64 array. Sparse (CSR) input is made dense on arrival, absent cells being 0."""

    __slots__ = ("_array", "dtype")

    def __init__(
        self,
        data: Sequence[Any] | np.ndarray,
        dtype: TensorDtype,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype not in ("float32", "int64"):
            raise BadRequest(f"TensorData dtype is {dtype!r}; it must be 'float32' or 'int64'.")
        array = np.asarray(data, dtype=dtype)
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            array = _densify(array.ravel(), shape, sparse_crow_indices, sparse_col_indices)
        elif shape is not None:
            if any(n < 0 for n in shape) or math.prod(shape) != array.size:
                raise BadRequest(f"TensorData has {array.size} values, which do not fill the shape {list(shape)}.")
            array = array.reshape(tuple(shape))
        self._array = array
        self.dtype = dtype

    @classmethod
    def of(cls, values: Any, dtype: TensorDtype | None = None) -> TensorData:
        """Anything array-like: a list, a numpy array, a torch tensor; the dtype is inferred if not given."""
        if isinstance(values, TensorData):
            return values
        if hasattr(values, "detach"):  # a torch tensor, without importing torch
            values = values.detach().cpu()
            values = (values.float() if values.is_floating_point() else values).numpy()
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise BadRequest(f"expected numbers, got an array of {array.dtype} (ragged or non-numeric input).")
        return cls(array, dtype or ("float32" if array.dtype.kind == "f" else "int64"))

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        return cls.of(tensor)

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def data(self) -> list[Any]:
        """The values as one flat list."""
        return self._array.ravel().tolist()

    def to_numpy(self) -> np.ndarray:
        return self._array

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.array(self._array))  # a copy: torch wants writable memory

    def tolist(self) -> list[Any]:
        return self._array.tolist()

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(
            self._array, other._array, equal_nan=self.dtype == "float32"
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData({np.array2string(self._array, threshold=8)}, dtype={self.dtype!r}, shape={self.shape})"

    def __getstate__(self) -> tuple[np.ndarray, TensorDtype]:
        return self._array, self.dtype

    def __setstate__(self, state: tuple[np.ndarray, TensorDtype]) -> None:
        self._array, self.dtype = state


_MAX_CELLS = 2**28  # 1 GiB of float32: a shape is only two numbers, and must not be able to ask for all memory


def _densify(
    values: np.ndarray, shape: Sequence[int] | None, crow: Sequence[int] | None, col: Sequence[int] | None
) -> np.ndarray:
    if crow is None or col is None or shape is None or len(shape) != 2:
        raise BadRequest("a sparse tensor needs sparse_crow_indices, sparse_col_indices and a shape of two numbers.")
    rows, columns = shape
    if min(rows, columns) < 0 or rows * columns > _MAX_CELLS:
        raise BadRequest(f"a sparse tensor has the shape {list(shape)}; made dense it may have {_MAX_CELLS} cells.")
    crow_indices, col_indices = np.asarray(crow, dtype=np.int64), np.asarray(col, dtype=np.int64)
    counts = np.diff(crow_indices)
    if len(crow_indices) != rows + 1 or (counts < 0).any() or crow_indices[0] != 0 or crow_indices[-1] != len(values):
        raise BadRequest(f"sparse_crow_indices do not describe {len(values)} values in {rows} rows.")
    if len(col_indices) != len(values) or (len(values) and not (0 <= col_indices.min() <= col_indices.max() < columns)):
        raise BadRequest(
            f"sparse_col_indices must hold one column in 0..{columns - 1} for each of {len(values)} values."
        )
    dense = np.zeros((rows, columns), dtype=values.dtype)
    dense[np.repeat(np.arange(rows), counts), col_indices] = values
    return dense


# What plain lists become, by key; other keys keep the kind of number they hold.
LOSS_INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "loss_weights": "float32",
    "mask": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


@dataclass(frozen=True)
class Datum:
    """One training example: N input tokens and loss inputs of length N, already shifted (input t[:-1], target t[1:]).

    Loss inputs may be lists, numpy arrays or torch tensors; they are kept as `TensorData`.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = {}
        for key, value in self.loss_fn_inputs.items():
            try:
                inputs[key] = TensorData.of(value, LOSS_INPUT_DTYPES.get(key))
            except (TypeError, ValueError) as error:
                raise BadRequest(f"loss_fn_inputs[{key!r}] cannot be read as numbers: {error}") from error
        object.__setattr__(self, "loss_fn_inputs", inputs)


# --------------------------------------------------------------------------------------------------------------------
# Parameters


def _real(value: object) -> float:
    """The number that was given, NaN for what is none: text, True, or more than a float holds."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


MAX_RANK = 1024
"""Far above what is of use; without a bound one request could ask for more memory than there is."""


@dataclass(frozen=True)
class LoraConfig:
    """Which linears get an adapter, and how wide it is."""

    rank: int = 16
    """Width of the low-rank matrices, from 1 to `MAX_RANK`."""
    seed: int | None = None
    """Seed of the initial weights; None draws a fresh one."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, Integral) or isinstance(self.rank, bool) or not 1 <= self.rank <= MAX_RANK:
            raise BadRequest(f"LoRA rank is {self.rank!r:.40}; it must be a whole number from 1 to {MAX_RANK}.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise BadRequest(f"LoRA seed is {self.seed!r:.40}; it must fit into 64 bits, or be None for a fresh one.")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise BadRequest("train_mlp, train_attn and train_unembed are all False: nothing to train. Turn one on.")


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step. The defaults are those of the MinT documents; `mint.tinker.AdamParams` has the Tinker SDK's."""

    learning_rate: float = 2e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled: weights shrink by learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Largest global norm of the adapter's gradient; 0 leaves it alone."""
    betas: InitVar[tuple[float, float] | None] = None
    """Another spelling of (beta1, beta2)."""

    def __post_init__(self, betas: tuple[float, float] | None) -> None:
        if isinstance(betas, (tuple, list)):  # left out, the class attribute default stands here
            object.__setattr__(self, "beta1", float(betas[0]))
            object.__setattr__(self, "beta2", float(betas[1]))
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm", "beta1", "beta2"):
            value, below = getattr(self, name), 1 if name.startswith("beta") else math.inf
            if not 0 <= (number := _real(value)) < below:
                limit = " and below 1" if below == 1 else ""
                raise BadRequest(f"AdamParams.{name} is {value!r:.40}; it must be a finite number, at least 0{limit}.")
            object.__setattr__(self, name, number)  # numpy's numbers are welcome, but do not become JSON


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a completion. `stop` mixes strings and token ids freely; the end-of-sequence token always stops too,
    unless `stop=[]`, which turns every stop off."""

    max_tokens: int | None = None
    """None: as many as the context holds."""
    seed: int | None = None
    """Same seed, same prompt, same weights: same samples; the samples of one request differ from each other."""
    stop: str | Sequence[str | int] | None = None
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    stop_token_ids: InitVar[Sequence[int] | None] = None
    """Another spelling of token ids in `stop`; both may be given."""

    def __post_init__(self, stop_token_ids: Sequence[int] | None) -> None:
        stop: list[str | int] | None
        if self.stop is None:
            stop = None
        elif isinstance(self.stop, (str, int)):
            stop = [self.stop]
        else:
            stop = list(self.stop)
        if isinstance(stop_token_ids, Sequence):
            stop = [*(stop or []), *stop_token_ids]
        for item in stop or []:
            if isinstance(item, bool) or not isinstance(item, (str, int, np.integer)) or item == "":
                raise BadRequest(f"stop holds {item!r}; each stop must be a non-empty string or a token id.")
        object.__setattr__(self, "stop", stop if stop is None else [s if isinstance(s, str) else int(s) for s in stop])
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if not 0 <= _real(self.temperature) < math.inf:
            raise BadRequest(f"temperature is {self.temperature!r:.40}; it must be a number, 0 (greedy) or more.")
        if not 0 < _real(self.top_p) <= 1:
            raise BadRequest(f"top_p is {self.top_p!r:.40}; it must be a number in (0, 1].")
        if self.top_k == 0 or not -1 <= self.top_k < 2**31:
            raise BadRequest(f"top_k is {self.top_k!r:.40}; it must be -1 (no limit) or from 1 to {2**31 - 1}.")
        if not 0 <= _real(self.min_p) < 1:
            raise BadRequest(f"min_p is {self.min_p!r:.40}; it must be a number in [0, 1).")

    @property
    def stop_strings(self) -> list[str]:
        return [s for s in self.stop or [] if isinstance(s, str)]

    @property
    def stop_ids(self) -> list[int]:
        return [s for s in self.stop or [] if isinstance(s, int)]

    @property
    def stops_at_eos(self) -> bool:
        return self.stop is None or len(self.stop) > 0


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


# --------------------------------------------------------------------------------------------------------------------
# Results of training and sampling

TopkRow = list[tuple[int, float]]


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


@dataclass(frozen=True)
class ForwardBackwardOutput:
    loss_fn_outputs: list[dict[str, TensorData]]
    """One dict a datum; `logprobs` holds the log-prob of every target token."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Names end in how chunks combine: `loss:sum`, `ratio:mean`, `ratio:max`."""
    loss_fn_output_type: str = "TensorDict"


@dataclass(frozen=True)
class OptimStepResponse:
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class SaveWeightsForSamplerResponse:
    path: str | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str | None = None
    model_id: str | None = None


# --------------------------------------------------------------------------------------------------------------------
# What the server says about itself, runs and checkpoints


@dataclass(frozen=True)
class SupportedModel:
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]
    loss_fns: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Every loss by name, with its options and their defaults."""
    honoured: dict[str, list[str]] = field(default_factory=dict)
    """The fields that change something, by the part of a request they belong to."""
    refused: dict[str, str] = field(default_factory=dict)
    """Fields of the protocol that are answered with an error, and why. Any other field is refused too."""


@dataclass(frozen=True)
class ModelData:
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True)
class GetInfoResponse:
    model_id: str
    model_data: ModelData
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


@dataclass(frozen=True)
class WeightsInfoResponse:
    base_model: str
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@dataclass(frozen=True)
class GetSamplerResponse:
    sampler_id: str
    base_model: str
    model_path: str | None = None


@dataclass(frozen=True)
class Cursor:
    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_id: str
    """`{kind}/{name}`, kind being weights, sampler_weights or external_weights."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TrainingRun:
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TrainingRunsResponse:
    training_runs: list[TrainingRun]
    cursor: Cursor


@dataclass(frozen=True)
class CheckpointsListResponse:
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True)
class ListSessionsResponse:
    sessions: list[str]


@dataclass(frozen=True)
class GetSessionResponse:
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Usage:
    """What one key used for one run, or under the empty name for none."""

    key: str
    """The key's name."""
    owner: str
    """Its id, which stays when the name changes."""
    run: str
    requests: int
    prompt_tokens: int
    """Prompts, and what was scored without training on it."""
    sampled_tokens: int
    trained_tokens: int
    engine_seconds: float
    disk_bytes: int
    """Of the checkpoints there are now."""


@dataclass(frozen=True)
class UsageResponse:
    usage: list[Usage]


@dataclass(frozen=True)
class CheckpointArchiveUrlResponse:
    url: str
    expires: datetime


CHECKPOINT_KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@dataclass(frozen=True)
class ParsedCheckpointTinkerPath:
    """`tinker://<training run>/<kind>/<name>`; `mint://` says the same."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, path: str) -> ParsedCheckpointTinkerPath:
        scheme, separator, rest = path.partition("://")
        parts = rest.split("/")
        known = scheme in ("tinker", "mint") and separator and len(parts) == 3 and all(parts)
        if not known or parts[1] not in CHECKPOINT_KINDS:
            raise BadRequest(
                f"{path!r} is not a checkpoint path; expected tinker://<training run>/<weights|sampler_weights>/<name> "
                "as returned by save_state and save_weights_for_sampler."
            )
        return cls(f"tinker://{rest}", parts[0], CHECKPOINT_KINDS[parts[1]], f"{parts[1]}/{parts[2]}")


LossFnConfig = Mapping[str, float | str]
