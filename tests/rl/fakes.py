"""A service in memory: a bigram language model with true gradients behind the client's method names.

The policy is one [V, V] table of logits, the next token given the last. Small enough to check by hand, yet sampling,
log-probs, losses, Adam and snapshots are real, so loops can learn on it. A token is a character of `ALPHABET`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from mint.rl.hashing import stable_hash
from mint.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

T = TypeVar("T")

ALPHABET = "\x00abcdefghijklmnopqrstuvwxyz0123456789 +-*/=?.:,<>_{}\"'\nABCDEFGHIJKLMNOPQRSTUVWXYZ()[]!|#@"
EOS = 0


class CharTokenizer:
    """One token a character; 0 ends a sequence."""

    eos_token_id = EOS
    all_special_ids = (EOS,)
    vocab_size = len(ALPHABET)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ALPHABET.index(character) for character in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(ALPHABET[token] for token in tokens if token != EOS)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
    ) -> str:
        text = "".join(f"<{m['role']}>{m['content']}\x00" for m in conversation)
        return text + ("<assistant>" if add_generation_prompt else "")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Ready(Generic[T]):
    """A future that is done."""

    def __init__(self, value: T) -> None:
        self.value = value

    def result(self, timeout: float | None = None) -> T:
        return self.value

    async def result_async(self, timeout: float | None = None) -> T:
        return self.value

    def __await__(self) -> Any:
        yield from ()
        return self.value


@dataclass
class FakeSamplingClient:
    table: np.ndarray
    requests: list[tuple[ModelInput, int, SamplingParams]] = field(default_factory=list)
    draws: int = 0

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.requests.append((prompt, num_samples, sampling_params))
        self.draws += 1
        seed = self.draws if sampling_params.seed is None else sampling_params.seed
        return SampleResponse([self._draw(prompt, sampling_params, seed, i) for i in range(num_samples)])

    def _draw(self, prompt: ModelInput, params: SamplingParams, seed: int, index: int) -> SampledSequence:
        rng = np.random.default_rng(stable_hash(seed, index))
        last, tokens, logprobs = prompt.to_ints()[-1], [], []
        stops = {EOS, *params.stop_ids} if params.stops_at_eos else set()
        while len(tokens) < (params.max_tokens or 100):
            raw = log_softmax(self.table[last])
            if params.temperature == 0:
                last = int(raw.argmax())
            else:
                last = int(rng.choice(len(raw), p=np.exp(log_softmax(self.table[last] / params.temperature))))
            tokens.append(last)
            logprobs.append(float(raw[last]))
            text = CharTokenizer().decode(tokens)
            if last in stops or any(stop in text for stop in params.stop_strings):
                return SampledSequence(tokens, logprobs, "stop")
        return SampledSequence(tokens, logprobs, "length")

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        tokens = prompt.to_ints()
        rows = log_softmax(self.table[tokens[:-1]])
        return [None, *(float(row[token]) for row, token in zip(rows, tokens[1:], strict=True))]

    def get_tokenizer(self) -> CharTokenizer:
        return CharTokenizer()


def token_loss_slope(
    loss_fn: str, p: np.ndarray, inputs: dict[str, np.ndarray], config: Mapping[str, Any]
) -> np.ndarray:
    """dLoss/dp for every token."""
    weights = inputs.get("weights", np.ones_like(p))
    if loss_fn == "cross_entropy":
        return -weights
    ratio, advantage = np.exp(p - inputs["logprobs"]), inputs["advantages"]
    if loss_fn == "importance_sampling":
        return -ratio * advantage * weights
    if loss_fn == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        bound = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        return np.where(bound, 0.0, -ratio * advantage) * weights
    if loss_fn == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        return -np.clip(ratio, low, high) * advantage * weights
    raise AssertionError(f"the fake has no loss {loss_fn}")


@dataclass
class FakeTrainingClient:
    """Keeps a log of its calls in `calls`."""

    table: np.ndarray
    gradient: np.ndarray = field(init=False)
    moments: tuple[np.ndarray, np.ndarray] = field(init=False)
    steps: int = 0
    pending: int = 0
    calls: list[str] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gradient = np.zeros_like(self.table)
        self.moments = np.zeros_like(self.table), np.zeros_like(self.table)

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, Any] | None, backward: bool
    ) -> ForwardBackwardOutput:
        outputs = []
        for datum in data:
            tokens = np.array(datum.model_input.to_ints())
            inputs = {key: value.to_numpy().astype(np.float64) for key, value in datum.loss_fn_inputs.items()}
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            rows = log_softmax(self.table[tokens])
            p = rows[np.arange(len(targets)), targets]
            if backward:
                slope = token_loss_slope(loss_fn, p, inputs, config or {})
                per_token = -np.exp(rows) * slope[:, None]
                per_token[np.arange(len(targets)), targets] += slope
                np.add.at(self.gradient, tokens, per_token)
                self.pending += 1
            outputs.append({"logprobs": TensorData.of(p, "float32")})
        return ForwardBackwardOutput(outputs)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Ready[ForwardBackwardOutput]:
        self.calls.append(f"forward {loss_fn} {len(data)}")
        return Ready(self._pass(data, loss_fn, loss_fn_config, backward=False))

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Ready[ForwardBackwardOutput]:
        self.calls.append(f"forward_backward {loss_fn} {len(data)}")
        return Ready(self._pass(data, loss_fn, loss_fn_config, backward=True))

    async def optim_step_async(self, adam_params: AdamParams) -> Ready[OptimStepResponse]:
        self.calls.append(f"optim_step {adam_params.learning_rate:g}")
        if not self.pending:
            return Ready(OptimStepResponse({"skipped:max": 1.0}))
        self.steps += 1
        b1, b2 = adam_params.beta1, adam_params.beta2
        m, v = (b1 * self.moments[0] + (1 - b1) * self.gradient, b2 * self.moments[1] + (1 - b2) * self.gradient**2)
        self.moments = m, v
        update = m / (1 - b1**self.steps) / (np.sqrt(v / (1 - b2**self.steps)) + adam_params.eps)
        self.table = self.table - adam_params.learning_rate * update
        self.gradient, self.pending = np.zeros_like(self.table), 0
        return Ready(OptimStepResponse({}))

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> FakeSamplingClient:
        self.calls.append("save_weights_and_get_sampling_client")
        return FakeSamplingClient(self.table.copy())

    def get_tokenizer(self) -> CharTokenizer:
        return CharTokenizer()
