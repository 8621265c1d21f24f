"""The tokenizer of a base model, found on this machine or by name, kept for the process."""

from __future__ import annotations

import threading
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from mint.errors import NotFound

# transformers puts another object into its place while it is imported: a second thread would find it without names.
_importing = threading.Lock()
_BUNDLED = {"mint/tiny": Path(__file__).parents[1] / "models" / "tiny"}


def load_tokenizer(model_name: str, tokenizer_id: str | None = None) -> Any:
    """A Hugging Face tokenizer: from `tokenizer_id` if that folder exists here, else by the model's name."""
    if tokenizer_id is not None and Path(tokenizer_id).is_dir():
        return _load(tokenizer_id)
    if (bundled := _BUNDLED.get(model_name)) is not None:
        return _load(str(bundled))
    if Path(model_name).is_dir():
        return _load(model_name)
    return _load((tokenizer_id or model_name).partition(":")[0])  # some servers append a variant after a colon


@lru_cache(maxsize=16)
def _load(source: str) -> Any:
    with _importing:
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise NotFound(
            f"no tokenizer for {source!r} could be loaded on this machine ({str(error).splitlines()[0]}). Download the "
            "model once, or name it by a local folder that both this script and the server can read."
        ) from error
    # Token ids from `apply_chat_template`, as all that was written before transformers 5 expects; from 5 on the default
    # is a dict, whose keys are what `list(...)` would make of it. `return_dict=True` still asks for one.
    tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, return_dict=False)
    return tokenizer
