"""What a server says of itself, as tiles."""

import asyncio
from typing import Any

import pytest

from mint.config import ClientConfig
from mint.dashboard.server import doing, figures_of
from mint.dashboard.serving import Refused, Serving

FIGURES: dict[str, Any] = {
    "version": "1", "uptime_seconds": 75, "ready": False, "not_ready_because": "the disk is <full>",
    "queue": {"requests": 3, "samples": 40, "bytes": 10, "results": 0, "queue_state": "active",
              "queue_state_reason": None},
    "tokens_per_second": {"sampled": 1234.0, "trained": 56.0},
    "engine": {"restarts": 2, "samples_running": 8, "samples_waiting": 1, "kv_blocks_used": 25, "kv_blocks_total": 100},
    "adapters": {"device": {"count": 4}, "host": {"count": 2}, "disk": {"count": 1}},
    "memory": {"server_bytes": 1, "engine_bytes": 2**30, "device_bytes": 0, "free_bytes": 2**31},
    "disk_free_bytes": 5, "models": [], "tenants": [],
}  # fmt: skip


class Answering(Serving):
    def __init__(self, answer: Any) -> None:
        super().__init__(ClientConfig("http://127.0.0.1:9"))
        self.answer = answer

    async def get(self, path: str, **params: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_figures_become_tiles_and_reasons_are_escaped() -> None:
    tiles = {name: (value, more) for name, value, more in doing(FIGURES)}
    assert tiles["State"] == ("not ready", "the disk is &lt;full&gt;")
    assert tiles["Queue"] == ("3", "requests, and 40 samples")
    assert tiles["Cache"] == ("25 %", "of 100 blocks")
    assert tiles["Adapters"] == ("7", "4 device, 2 host, 1 disk")
    assert tiles["Memory"] == ("1.0 GiB", "engine, 2.0 GiB free")
    assert tiles["Up"] == ("1 min 15 s", "2 restarts of the engine")


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_does_not_tell_is_no_fault(status: int) -> None:
    assert asyncio.run(figures_of(Answering(Refused(status, "no")))) is None
    assert asyncio.run(figures_of(Answering(FIGURES))) == FIGURES


def test_any_other_refusal_is_told() -> None:
    with pytest.raises(Refused, match="answered 500"):
        asyncio.run(figures_of(Answering(Refused(500, "broken"))))
