"""Media types and headers of the wire."""

from __future__ import annotations

PROTOBUF = "application/x-protobuf"
HOLD, HELD = "x-mint-hold", "x-mint-held"
"""MinT's own headers: a request sent with the first is answered by its result, with its id in the second. A sample's
answer begins when the result is there; a training request's as soon as the request is safe, and its body is `LATER`."""
SAMPLER = "x-mint-sampler"
"""With which the answer to a snapshot begins: the sampling session it will have, which may be sampled at once."""
JSON = "application/json"
LATER = "application/x-mint-later"
"""A body that comes when the result is there: its media type, a line break and the result, or nothing if it took too
long and has to be polled for."""
FRAMES = "application/x-mint-frames"
"""Several bodies in one, each with its length in front of it."""
