"""The base models of an engine: exactly those it was made with, or any, each loaded when it is first asked for.

They load in a thread of their own, so that a download holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mint.engine.device import Device, choose_threads
from mint.engine.hub import BUNDLED
from mint.engine.lanes import Steps
from mint.engine.tenants import Runtime
from mint.errors import NotFound


class Runtimes:
    def __init__(
        self, models: Sequence[str] | None, device: Device | None, lean: bool, on_load: Callable[[Runtime], None]
    ) -> None:
        """`on_load` hears of each one that is loaded later."""
        self._catalogue = None if models is None else tuple(models)
        self._device = device
        self._lean = lean
        self._on_load = on_load
        self.loaded = {name: Runtime(name, device, lean) for name in models or ()}
        self._loading: dict[str, Future[Runtime]] = {}
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-loader")

    def names(self) -> list[str]:
        """What may be asked for, as far as it is known."""
        return list(dict.fromkeys([*BUNDLED, *self.loaded])) if self._catalogue is None else list(self._catalogue)

    def get(self, name: str) -> Steps:
        """On the worker: the base model's runtime, waiting until it is loaded if need be."""
        if name in self.loaded:
            return self.loaded[name]
        if self._catalogue is not None:
            raise NotFound(f"there is no model {name!r} here; there is {', '.join(self._catalogue) or 'none'}.")
        if name not in self._loading:
            self._loading[name] = self._loader.submit(Runtime, name, self._device, self._lean)
        loading = self._loading[name]
        yield loading
        if self._loading.get(name) is loading:
            del self._loading[name]  # after a failure the next call tries again
        if name not in self.loaded:
            self.loaded[name] = loading.result()
            self._on_load(self.loaded[name])
        return self.loaded[name]

    def are_narrow(self) -> bool:
        """Whether every model computes in one thread of a CPU: then several can at once. One that takes all cores
        would wait for the slowest of them at every step."""
        models = [runtime.model for runtime in self.loaded.values()]
        return all(m.device.type == "cpu" and choose_threads(m.hidden_size).count == 1 for m in models)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
