"""Several bodies in one, each with its length in front of it (`media.FRAMES`)."""

from __future__ import annotations

from collections.abc import Iterable

from mint.errors import BadRequest


def framed(bodies: Iterable[bytes]) -> bytes:
    return b"".join(part for body in bodies for part in (len(body).to_bytes(4, "big"), body))


class FrameReader:
    """The bodies of a stream of frames, as they become whole; at most so many at a time."""

    def __init__(self, most: int | None = None) -> None:
        self._rest = b""
        self._most = most

    def feed(self, data: bytes) -> list[bytes]:
        data, start = self._rest + data, 0
        bodies: list[bytes] = []
        while len(data) - start >= 4 and len(data) >= (
            end := start + 4 + int.from_bytes(data[start : start + 4], "big")
        ):
            if len(bodies) == self._most:
                raise BadRequest(f"the body has more than {self._most} frames; send fewer at a time.")
            bodies.append(data[start + 4 : end])
            start = end
        self._rest = data[start:]
        return bodies

    @property
    def whole(self) -> bool:
        return not self._rest


def read_frames(data: bytes, most: int | None = None) -> list[bytes]:
    reader = FrameReader(most)
    bodies = reader.feed(data)
    if not reader.whole:
        raise BadRequest("the body's last frame ends before the length that stands in front of it.")
    return bodies
