"""What a server of this version honours and refuses, field by field, for `get_server_capabilities`.

Read off the types that are used, so that it cannot say anything else; docs/arguments.md has every argument there is.
"""

from __future__ import annotations

import inspect

from mint.checks import LOSS_FNS, UNCHECKED
from mint.types import AdamParams, LoraConfig, SampleRequest, SamplingParams


def _fields(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


HONOURED: dict[str, list[str]] = {
    "sampling_params": _fields(SamplingParams),
    "sample": _fields(SampleRequest),
    "adam_params": [
        name for name in _fields(AdamParams) if name != "betas"
    ],  # a spelling of our client, not the wire's
    "lora_config": _fields(LoraConfig),
    "loss_fn_inputs": sorted({name for menu in LOSS_FNS.values() for name in menu.inputs}),
    "loss_fn_config": sorted({name for menu in LOSS_FNS.values() for name in menu.options} | {UNCHECKED}),
}

REFUSED: dict[str, str] = {
    "optimizer_config": "the optimizer is AdamW, without further settings",
    "optimizer_params": "the optimizer is AdamW: adam_params",
    "record_stability_info": "serves the loss stable_reinforce, which is not here",
    "model_input_spans": "serves the loss stable_reinforce, which is not here",
    "loss_fn_input_spans": "serves the loss stable_reinforce, which is not here",
    "image": "text only",
    "dmel": "text only",
    "age_encryption_recipients": "exports are not encrypted",
    "weights_access_token": "checkpoints are shared by publishing them",
    "destination_project_id": "there are no projects",
}
