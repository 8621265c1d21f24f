"""Requests drawn from the OpenAPI page; `benchmarks/fuzz.py` asks many more."""

from collections.abc import Callable

from tests.server.fuzzing import fuzz
from tests.server.live import Live


def test_nothing_drawn_from_the_openapi_page_causes_a_5xx(serve: Callable[..., Live]) -> None:
    live = serve(poll_seconds=0.01, gap_seconds=0.01, load_wait_seconds=0.1)
    told = fuzz(live.url, examples=2, derandomize=True)
    assert len(told) > 40 and sum(sum(seen.values()) for seen in told.values()) > 150
    assert live.fetch(live.step(live.model(), 1))["metrics"]
