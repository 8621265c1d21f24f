"""One training example: what the model reads and what its loss is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        if not isinstance(self.model_input, ModelInput):
            raise BadRequest(
                f"model_input of a Datum is a {type(self.model_input).__name__}; wrap token ids in "
                "types.ModelInput.from_ints(tokens)."
            )
        inputs = {}
        for key, value in self.loss_fn_inputs.items():
            try:
                inputs[key] = TensorData.of(value, LOSS_INPUT_DTYPES.get(key))
            except (TypeError, ValueError) as error:
                raise BadRequest(f"loss_fn_inputs[{key!r}] cannot be read as numbers: {error}") from error
        object.__setattr__(self, "loss_fn_inputs", inputs)
