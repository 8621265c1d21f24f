"""One training example: what the model reads and what its loss is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mint.errors import BadRequest
from mint.types.model_input import ModelInput
from mint.types.tensors import TensorData, TensorDtype

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
        _check_input("model_input of a Datum", self.model_input)
        inputs = {key: _tensor(f"loss_fn_inputs[{key!r}]", key, value) for key, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", inputs)


@dataclass(frozen=True)
class ReverseKLDatum:
    """N tokens that the student reads and what the reference reads instead; `target_tokens` and `weights` go with the
    student's, as in a `Datum`. Both inputs end with the same tokens: in front of those that have a weight the reference
    may be told more, or less."""

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    weights: TensorData

    def __post_init__(self) -> None:
        for name in ("student_input", "reference_input"):
            _check_input(f"{name} of a ReverseKLDatum", getattr(self, name))
        for name in ("target_tokens", "weights"):
            object.__setattr__(self, name, _tensor(name, name, getattr(self, name)))
        length, shapes = self.student_input.length, (self.target_tokens.shape, self.weights.shape)
        if shapes != ([length], [length]):
            raise BadRequest(
                f"student_input has {length} tokens, target_tokens the shape {shapes[0]} and weights {shapes[1]}; all "
                "three go position by position."
            )
        first = next(iter(np.flatnonzero(self.weights.to_numpy())), length)
        if length - first > self.reference_input.length:
            raise BadRequest(
                f"reference_input has {self.reference_input.length} tokens, and weights begin {length - first} before "
                "the end; the reference has to read all tokens that have a weight."
            )

    def student(self) -> Datum:
        return Datum(self.student_input, {"target_tokens": self.target_tokens, "weights": self.weights})

    def reference(self) -> Datum:
        """What the reference reads, with the weights where they belong in it."""
        more = self.reference_input.length - self.student_input.length

        def moved(values: np.ndarray) -> np.ndarray:
            return np.pad(values[max(0, -more) :], (max(0, more), 0))

        inputs = {"target_tokens": self.target_tokens, "weights": self.weights}
        return Datum(
            self.reference_input, {key: TensorData.of(moved(values.to_numpy())) for key, values in inputs.items()}
        )


def _check_input(what: str, given: object) -> None:
    if not isinstance(given, ModelInput):
        raise BadRequest(f"{what} is a {type(given).__name__}; wrap token ids in types.ModelInput.from_ints(tokens).")


def _tensor(what: str, key: str, value: object) -> TensorData:
    try:
        return TensorData.of(value, LOSS_INPUT_DTYPES.get(key))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{what} cannot be read as numbers: {error}") from error
