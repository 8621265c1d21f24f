"""The promise itself, with the real engine: `kill -9` of engine and server, and weights equal to the last bit."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import faults


@pytest.mark.timeout(300)
def test_killing_engine_and_server_at_random_changes_no_bit(tmp_path: Path) -> None:
    options = Namespace(steps=10, kills=3, minutes=2.0, wait=30.0, sdk=None, disk_mib=None, patience=120.0, seed=3)
    quiet = faults.quiet_run(options, tmp_path / "quiet", patient=False)
    data = tmp_path / "data"
    data.mkdir()
    found = faults.campaign(options, data, quiet, [(sys.executable, "mint")])
    assert sum(found["kills"].values()) >= 1
    assert found["finished"] >= 1
    assert (found["different"], found["lost_saves"], found["errors"], found["wedged"]) == (0, 0, 0, 0), found["amiss"]
