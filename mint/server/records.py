"""Records in a file, each with its own checksum: what a journal is made of. What they say is not known here.

A record is a fixed header (magic, two lengths, checksum of the contents, checksum of the header), a JSON head and a
payload of raw bytes. The header's own checksum makes its lengths trustworthy, which tells a record that was cut off
while it was written (the file ends before it does) from one that has been damaged since.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import Internal

_MAGIC = b"MJ01"
_LENGTHS = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
_HEADER = _LENGTHS.size + _CHECK.size


class Damaged(Internal):
    """A file that was written whole does not hold any more what was written."""


@dataclass(frozen=True)
class Record:
    head: dict[str, Any]
    offset: int
    """Of the payload in the file."""
    length: int
    check: int
    """Checksum of the payload alone, for when it is read again."""


def encode(head: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    contents = zlib.crc32(payload, zlib.crc32(text))
    lengths = _LENGTHS.pack(_MAGIC, len(text), len(payload), contents)
    return b"".join((lengths, _CHECK.pack(zlib.crc32(lengths)), text, payload))


def record_of(head: dict[str, Any], payload: bytes, encoded: bytes, at: int) -> Record:
    """What reading a record back gives that was written at this place of its file."""
    return Record(head, at + len(encoded) - len(payload), len(payload), zlib.crc32(payload))


def read_all(file: Path, may_be_cut: bool) -> tuple[list[Record], int, Damaged | None]:
    """The records of a file, the bytes they take, and what is wrong with the file after them. If `may_be_cut`, that it
    ends within a record is nothing wrong: a crash cut that one off, so it was never acknowledged."""
    data = memoryview(file.read_bytes())
    records: list[Record] = []
    at = 0
    while at < len(data):
        try:
            record = _read(data, at, file, len(records))
        except Damaged as damage:
            return records, at, damage
        if record is None:
            ends = Damaged(f"{file} is damaged: it ends within record {len(records)} (at byte {at}).")
            return records, at, None if may_be_cut else ends
        records.append(record)
        at = record.offset + record.length
    return records, at, None


def read_payload(file: Path, record: Record) -> bytes:
    with file.open("rb") as opened:
        opened.seek(record.offset)
        payload = opened.read(record.length)
    if len(payload) != record.length or zlib.crc32(payload) != record.check:
        raise Damaged(f"{file} is damaged: the payload at byte {record.offset} does not match its checksum.")
    return payload


def _read(data: memoryview, at: int, file: Path, number: int) -> Record | None:
    """The record at this place; None if the data ends before it does."""
    if len(data) - at < _HEADER:
        return None
    lengths, (check,) = bytes(data[at : at + _LENGTHS.size]), _CHECK.unpack_from(data, at + _LENGTHS.size)
    if zlib.crc32(lengths) != check or lengths[:4] != _MAGIC:
        if not any(data[at:]):  # a power cut can leave a file its length and not its contents
            return None
        raise Damaged(f"{file} is damaged: the header of record {number} (at byte {at}) does not match its checksum.")
    _, head_length, length, contents = _LENGTHS.unpack(lengths)
    start, end = at + _HEADER + head_length, at + _HEADER + head_length + length
    if end > len(data):
        return None
    text, payload = data[at + _HEADER : start], data[start:end]
    if zlib.crc32(payload, zlib.crc32(text)) != contents:
        raise Damaged(f"{file} is damaged: record {number} (at byte {at}) does not match its checksum.")
    return Record(json.loads(bytes(text)), start, length, zlib.crc32(payload))
