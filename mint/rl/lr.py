"""A learning rate to begin with, for any architecture, from its hidden size.

    rate = 5e-5 * (10 with LoRA) * (2000 / hidden size) ** exponent

The constants are the fits the Tinker cookbook publishes for Llama (0.781) and Qwen (0.0775). A family nobody has
fitted takes the mean of the two exponents: over the hidden sizes in use (1,024 to 8,192) that is within a factor of
1.7 of either, which a first run can bear.
"""

from __future__ import annotations

import json
from pathlib import Path

import mint
from mint.errors import BadRequest

BASE_RATE = 5e-5
LORA_FACTOR = 10.0
REFERENCE_WIDTH = 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
UNFITTED_EXPONENT = (0.781 + 0.0775) / 2


def get_lr(model_name: str, is_lora: bool = True, hidden_size: int | None = None) -> float:
    """A starting rate, for supervised training and RL alike; tune by factors of three from there.

    `hidden_size` is read from the model's configuration (bundled, a local folder, the Hub's cache or the Hub) unless
    given.
    """
    width = hidden_size or read_hidden_size(model_name)
    exponent = next((e for family, e in EXPONENTS.items() if family in model_name.lower()), UNFITTED_EXPONENT)
    return BASE_RATE * (LORA_FACTOR if is_lora else 1.0) * (REFERENCE_WIDTH / width) ** exponent


def read_hidden_size(model_name: str) -> int:
    """The width of the residual stream, by whichever name the architecture gives it."""
    config = json.loads(_config_file(model_name.partition(":")[0]).read_text())
    for part in (config, config.get("text_config", {}), config.get("llm_config", {})):
        for name in ("hidden_size", "d_model", "n_embd", "dim"):
            if isinstance(part.get(name), int):
                return int(part[name])
    raise BadRequest(f"the configuration of {model_name!r} names no hidden size; pass hidden_size= to get_lr.")


def _config_file(model_name: str) -> Path:
    bundled = Path(mint.__file__).parent / "models" / model_name.removeprefix("mint/") / "config.json"
    if model_name.startswith("mint/") and bundled.is_file():
        return bundled
    local = Path(model_name).expanduser() / "config.json"
    if local.is_file():
        return local
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_name, "config.json"))
    except (OSError, ValueError) as error:  # unreachable, unknown or malformed names all end here
        raise BadRequest(
            f"no configuration found for {model_name!r} ({type(error).__name__}); pass hidden_size= to get_lr."
        ) from error
