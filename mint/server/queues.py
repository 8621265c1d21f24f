"""How much is under way, and how much more is taken in: bounds per model, per session and in total, in requests and in
bytes, and what is said to those who have to wait.

A request that finds no room is answered 429 and may be sent again; it has not spent its sequence number. Three rules
keep a model's requests in order all the same: the one whose turn is next is always let in; after a refusal no later one
is let in before it; and its turn is not given away while it may still come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mint import machine
from mint.errors import Busy
from mint.server.limits import Limits


@dataclass(frozen=True)
class Load:
    """What a request puts into the queues."""

    session: str | None
    requests: int = 0
    """Training requests."""
    samples: int = 0
    """Sequences to be sampled."""
    bytes: int = 0
    model: str | None = None


@dataclass(frozen=True)
class Waiting:
    """Why a result is not there yet, in the protocol's words and in ours."""

    queue_state: str = "active"
    reason: str | None = None


class Queues:
    def __init__(self, limits: Limits, free_memory: Callable[[], int] = machine.free_memory) -> None:
        self._limits = limits
        self._free_memory = free_memory
        self._looked = 0.0
        self._free = 0
        self._requests: Counter[str | None] = Counter()
        self._samples: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()
        self._by_model: Counter[str] = Counter()
        self._model_bytes: Counter[str] = Counter()
        self._refused: dict[str, tuple[int, float]] = {}
        """The lowest number of each model that was turned away, and when last."""
        self.engine: dict[str, float] = {}
        """What the engine last told of itself."""

    # Going in and out -----------------------------------------------------------------------------------------------

    def enter(self, load: Load) -> Callable[[], None]:
        """Takes the load in; what it returns is called when it is done. `Busy` if there is no room."""
        self._check(load)
        return self._admit(load)

    def enter_in_order(self, load: Load, number: int | None, following: int) -> Callable[[], None]:
        """The same for a request with a number, on a model whose next number is `following`."""
        assert load.model is not None
        earlier = self._earlier(load.model, number)
        if number is None or number > following:
            if earlier is not None:
                raise Busy(f"request {earlier} of this model found no room and comes first; send this one again later.")
            try:
                self._check(load)
            except Busy:
                if number is not None:
                    lowest = min(number, self._refused.get(load.model, (number, 0.0))[0])
                    self._refused[load.model] = (lowest, time.monotonic())
                raise
        if number is not None and self._refused.get(load.model, (None,))[0] == number:
            del self._refused[load.model]
        return self._admit(load)

    def _admit(self, load: Load) -> Callable[[], None]:
        self._count(load, 1)
        inside = [load]

        def leave() -> None:
            if inside:
                self._count(inside.pop(), -1)

        return leave

    def expects(self, model: str) -> bool:
        """Whether a request of this model was turned away a moment ago, and will come again."""
        return self._earlier(model, None, anything=True) is not None

    def forget(self, model: str) -> None:
        self._refused.pop(model, None)

    def _earlier(self, model: str, number: int | None, anything: bool = False) -> int | None:
        lowest, when = self._refused.get(model, (0, 0.0))
        if model not in self._refused:
            return None
        if time.monotonic() - when > self._limits.refused_seconds:
            del self._refused[model]
            return None
        return lowest if anything or (number is not None and number > lowest) else None

    def _count(self, load: Load, sign: int) -> None:
        for counter, amount, key in (
            (self._requests, load.requests, load.session),
            (self._samples, load.samples, load.session),
            (self._bytes, load.bytes, load.session),
        ):
            counter[key] += sign * amount
            if not counter[key]:
                del counter[key]
        if load.model is not None:
            self._by_model[load.model] += sign * load.requests
            self._model_bytes[load.model] += sign * load.bytes
            if not self._by_model[load.model]:
                del self._by_model[load.model], self._model_bytes[load.model]

    def _check(self, load: Load) -> None:
        limits, session = self._limits, load.session
        bounds = [
            ("requests of this session", self._requests[session], load.requests, limits.session_requests),
            ("requests", self._requests.total(), load.requests, limits.pending_requests),
            ("samples of this session", self._samples[session], load.samples, limits.session_samples),
            ("samples", self._samples.total(), load.samples, limits.pending_samples),
            ("bytes of this session", self._bytes[session], load.bytes, limits.session_bytes),
            ("bytes", self._bytes.total(), load.bytes, limits.pending_bytes),
        ]
        if load.model is not None:
            bounds[:0] = [
                ("requests of this model", self._by_model[load.model], load.requests, limits.model_requests),
                ("bytes of this model", self._model_bytes[load.model], load.bytes, limits.model_bytes),
            ]
        for what, present, more, most in bounds:
            # One that is larger than the bound is let in when there is nothing else: it was not too large to be read.
            if more and present and present + more > most:
                raise Busy(f"{present} {what} are under way already and at most {most} may be; try again in a moment.")
        if self.short_of_memory():
            raise Busy(
                f"the server's machine has {self._free >> 20} MiB of memory left; the request waits until there is "
                "more. Try again in a moment."
            )

    # What is said ---------------------------------------------------------------------------------------------------

    def short_of_memory(self) -> bool:
        if time.monotonic() - self._looked > 1.0:
            self._looked, self._free = time.monotonic(), self._free_memory()
        return self._free < self._limits.least_free_memory

    def waiting(self) -> Waiting:
        """For somebody whose result has not come within a poll."""
        if self.short_of_memory():
            return Waiting("paused_capacity", f"the server's machine has {self._free >> 20} MiB of memory left")
        if line := int(self.engine.get("adapters_waiting", 0)):
            limit = int(self.engine.get("adapters_limit", 0))
            held = f" ({limit} fit)" if limit else ""
            return Waiting("paused_capacity", f"{line} adapters wait for a place on the device{held}")
        return Waiting()

    def depths(self) -> dict[str, int]:
        return {
            "requests": self._requests.total(),
            "samples": self._samples.total(),
            "bytes": self._bytes.total(),
            "models": len(self._by_model),
        }

    def of_sessions(self) -> dict[str, dict[str, int]]:
        """Requests and samples under way, by session."""
        keys = {key for key in (*self._requests, *self._samples) if key is not None}
        return {key: {"requests": self._requests[key], "samples": self._samples[key]} for key in keys}
