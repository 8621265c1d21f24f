"""A run with very many checkpoints: its lists are long, and nobody else waits for them."""

import threading
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from mint.server.checkpoints import Checkpoints
from mint.server.store import CheckpointRow, Store
from tests.server.live import Live
from tests.waiting import PATIENCE


def test_a_page_of_many_is_found_from_the_newest_on(live: Live) -> None:
    model, many = live.model(), 5000
    row = {"run_id": model, "owner": "local", "kind": "sampler_weights", "size_bytes": 1, "public": False}
    store = Store(live.config.database_address)
    with store.transaction() as session:
        rows = [row | {"name": f"n{n}", "folder": f"f{n}", "created": float(n)} for n in range(many)]
        session.execute(insert(CheckpointRow), rows)
    store.close()
    page = live.get("/checkpoints", limit=10, offset=many - 10)
    assert page["cursor"]["total_count"] == many
    assert [one["checkpoint_id"] for one in page["checkpoints"]] == [f"sampler_weights/n{n}" for n in range(9, -1, -1)]
    assert len(live.get(f"/training_runs/{model}/checkpoints")["checkpoints"]) == many


@pytest.mark.parametrize(
    ("slow", "path"), [("of_run", "/api/v1/training_runs/{}/checkpoints"), ("samplable", "/v1/models")]
)
def test_others_are_served_while_a_long_list_is_made(
    live: Live, monkeypatch: pytest.MonkeyPatch, slow: str, path: str
) -> None:
    model = live.model()
    saved = live.save(model, 1, "one", "save_weights_for_sampler")
    begun, served = threading.Event(), threading.Event()
    whole = getattr(Checkpoints, slow)

    def wait_for_the_other(self: Checkpoints, *args: Any) -> Any:
        begun.set()
        assert served.wait(PATIENCE), "somebody else was not served"
        return whole(self, *args)

    monkeypatch.setattr(Checkpoints, slow, wait_for_the_other)
    told: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: told.append(httpx.get(live.url + path.format(model), timeout=PATIENCE)))
    asking.start()
    assert begun.wait(PATIENCE)
    assert live.http.get("/healthz").status_code == 200
    served.set()
    asking.join()
    assert saved in told[0].text
