"""Futures that get the outcome of something else."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar

from mint.engine.faults import as_mint_error

T = TypeVar("T")


def settle(future: Future[Any], outcome: Any) -> None:
    """With a result or an exception, unless somebody cancelled it in time."""
    if future.set_running_or_notify_cancel():
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def after(first: Future[Future[T]]) -> Future[T]:
    """The result of the future that `first` results in."""
    last: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        settle(last, done.result() if error is None else as_mint_error(error))

    def follow(done: Future[Future[T]]) -> None:
        if (error := done.exception()) is not None:
            settle(last, error)
        else:
            done.result().add_done_callback(pass_on)

    first.add_done_callback(follow)
    return last
