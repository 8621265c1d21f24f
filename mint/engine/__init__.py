"""What computes: base weights once, many adapters, a trainer and a sampler in one loop. The public nouns are `Engine`
and, for the same in a process of its own, `EngineProcess`. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mint.engine.engine import Engine
    from mint.engine.process import EngineProcess

__all__ = ["Engine", "EngineProcess"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from mint.engine.engine import Engine

        return Engine
    if name == "EngineProcess":
        from mint.engine.process import EngineProcess

        return EngineProcess
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
