from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mint.engine import compiling


@pytest.mark.parametrize("chosen", [None, "/elsewhere"])
def test_what_is_compiled_is_kept_where_it_outlives_the_process_unless_somebody_chose_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen or compiling._TEMPORARY)
    compiling.compiled(lambda: None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (chosen or str(tmp_path / "mint" / "compiled"))
