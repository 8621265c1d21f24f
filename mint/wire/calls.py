"""What a request asks for, once it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mint.types import Datum, SampleRequest


@dataclass(frozen=True)
class ForwardBackwardCall:
    """One forward or forward_backward request."""

    model_id: str
    seq_id: int | None
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class ReverseKLCall:
    """One forward_backward_reverse_kl request. `reference_data` is what the reference reads, with the weights at the
    tokens that both read last."""

    reference: str
    data: Sequence[Datum]
    reference_data: Sequence[Datum]
    temperature: float


@dataclass(frozen=True)
class SampleCall:
    """One sample request and whom it asks: a sampling session, or a base model or checkpoint by name."""

    request: SampleRequest
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
