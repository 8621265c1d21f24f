"""A backend for the child of `EngineProcess` that needs no model: it answers what its arguments tell it to."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, SampledSequence, SampleRequest, SampleResponse, TensorData


class FakeBackend:
    def __init__(self) -> None:
        self._cancelled = 0
        self._never: Future[Any] = Future()

    def stats(self) -> Future[dict[str, float]]:
        return done({"cancelled": self._cancelled, "group": os.getpgrp(), "pid": os.getpid()})

    def forward(self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Any) -> Future[ForwardBackwardOutput]:
        """Twice the first input."""
        doubled = 2 * data[0].loss_fn_inputs["logprobs"].to_numpy()
        return done(ForwardBackwardOutput([{"logprobs": TensorData.of(doubled)}], {"config": config["x"]}))

    def release(self, name: str) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception({"bad": BadRequest("so bad"), "worse": ZeroDivisionError("zero")}[name])
        return future

    def load_model(self, base_model: str) -> Future[Any]:
        if base_model == "crash":
            os._exit(7)
        if base_model == "raise":
            raise ValueError("at once")
        return self._never

    def sample(
        self, policy: str, request: SampleRequest, on_tokens: Callable[[int, list[int], list[float]], None] | None
    ) -> Future[SampleResponse]:
        future: Future[SampleResponse] = Future()
        if policy == "endless":
            future.add_done_callback(self._count)
            if on_tokens:
                on_tokens(0, [1], [-1.0])
            return future
        if on_tokens:
            for i in range(3):
                on_tokens(0, [i], [-float(i)])
        return done(SampleResponse([SampledSequence([0, 1, 2], [0.0, -1.0, -2.0], "stop")]))

    def _count(self, future: Future[Any]) -> None:
        self._cancelled += future.cancelled()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def make(models: Sequence[str] | None) -> Any:
    return FakeBackend()


def make_without_kernel_help(models: Sequence[str] | None) -> Any:
    """The end of the pipe must be enough."""
    ctypes.CDLL(None).prctl(1, 0)
    return FakeBackend()


def make_failing(models: Sequence[str] | None) -> Any:
    raise BadRequest(f"cannot make {models}")


def make_slowly(models: Sequence[str] | None) -> Any:
    time.sleep(60)
    return FakeBackend()


BIG = np.arange(3_000_000, dtype=np.float32)


def make_unless_trouble(models: Sequence[str] | None) -> FakeBackend:
    if os.path.exists(os.environ["FAKE_BACKEND_TROUBLE"]):
        raise ValueError("trouble")
    return FakeBackend()


def die(models: Sequence[str] | None) -> FakeBackend:
    os._exit(9)
