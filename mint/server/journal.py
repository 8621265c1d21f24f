"""A model's journal: its training requests and their results, on disk before anybody hears of them.

A folder a model, in segments; each begins with what is needed to go on from there:

    000003.log      header (how the model was made, its next sequence number), then requests and results in order
    000003.state    internal state at the beginning of segment 3, once the backend has written it

Recovery starts from the newest state and carries out the requests of its segment and the later ones again. Older
segments only answer for results that clients may still ask for. What a request does is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import Busy
from mint.server import records
from mint.server.records import Damaged, Record

log = logging.getLogger("mint.server")

_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mint-journal")

_AT_ONCE = 1 << 16
"""Bytes of a record that is written without a change of threads, if it need not be flushed: the system takes so much
into its memory sooner than another thread wakes up."""

Head = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a record lies."""

    segment: int
    record: Record


Written = Callable[[Place | Busy], None]
"""Called on the event loop, in the order of the records, when a record is safe, or could not be written."""


class Disk:
    """What the journal asks of the system; tests put a failing one in its place. `observe` hears how many seconds each
    flush took."""

    def __init__(self, observe: Callable[[float], None] | None = None) -> None:
        self._observe = observe

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        started = time.perf_counter()
        os.fdatasync(descriptor)
        if self._observe is not None:
            self._observe(time.perf_counter() - started)


@dataclass(frozen=True)
class _Item:
    data: bytes
    head: Head
    payload: bytes
    flush: bool
    written: Written
    opens: bool = False
    """The first record of a new segment."""


@dataclass(frozen=True)
class Found:
    """What there is in a journal's folder."""

    created: Head
    """Of the newest segment's header: how the model was made."""
    resume: Head
    """Header of the segment to replay from."""
    old: list[Place]
    """Records of the segments before that, whose requests are part of the state."""
    live: list[Place]
    damage: Damaged | None = None
    """Why the records end here, if they should go on."""


class Journal:
    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or Disk()
        self._segment = -1
        self._descriptor: int | None = None
        self._length = 0  # of the present segment, whole records only
        self._pending: list[_Item] = []
        self._untold = 0
        self._writer: asyncio.Task[None] | None = None
        self._ids: dict[int, list[str]] = {}
        self.covered = -1
        """The segment whose state is the newest there is."""

    # Writing --------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether every record handed in has been heard of."""
        return self._untold == 0

    @property
    def segment(self) -> int:
        return self._segment

    @property
    def bytes_in_segment(self) -> int:
        return self._length

    def append(self, head: Head, payload: bytes, written: Written, flush: bool = True) -> None:
        """Adds a record; without `flush` it is safe from the end of this process, not of the machine."""
        self._put(_Item(records.encode(head, payload), head, payload, flush, written))

    def begin_segment(self, header: Head, written: Written) -> None:
        """Later records go to a new segment, which begins with this header."""
        self._put(_Item(records.encode(header), header, b"", True, written, opens=True))

    def _put(self, item: _Item) -> None:
        self._untold += 1
        loop = asyncio.get_running_loop()
        if self._writer is None and not item.flush and len(item.data) <= _AT_ONCE:
            loop.call_soon(self._told, [item], self._write([item]))
            return
        self._pending.append(item)
        if self._writer is None:
            self._writer = loop.create_task(self._drain())

    async def _drain(self) -> None:
        """Everything that arrived while the disk was busy is written and flushed together."""
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            while batch:
                count = next((n for n, item in enumerate(batch) if item.opens and n > 0), len(batch))
                group, batch = batch[:count], batch[count:]
                self._told(group, await loop.run_in_executor(_threads, self._write, group))
        self._writer = None

    def _told(self, group: list[_Item], outcome: list[Place] | Busy) -> None:
        for n, item in enumerate(group):
            self._untold -= 1
            _tell(item.written, outcome if isinstance(outcome, Busy) else outcome[n])

    def _write(self, group: list[_Item]) -> list[Place] | Busy:
        """On a thread of its own, where it has to wait for the disk. All of the group, or nothing."""
        before = self._segment
        try:
            if group[0].opens:
                self._begin(before + 1)
            assert self._descriptor is not None, "no segment has begun"
            if os.fstat(self._descriptor).st_size != self._length:  # what a failed write left could not be removed then
                os.ftruncate(self._descriptor, self._length)
            places, end = [], self._length
            for item in group:
                _write_whole(self._disk, self._descriptor, item.data)
                places.append(self._place(item, end))
                end += len(item.data)
            if any(item.flush for item in group):
                self._disk.sync(self._descriptor)
            if group[0].opens:
                _sync_folder(self.folder)
            self._length = end
            return places
        except OSError as error:
            self._undo(before)
            return Busy(
                f"the request could not be written to the server's journal ({error}), so it was not carried out. If "
                "its disk is full, make room; the same request can then be sent again."
            )

    def _begin(self, segment: int) -> None:
        if self._descriptor is not None:
            self._disk.sync(self._descriptor)  # only the last segment may end in the middle of a record
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log(segment).unlink(missing_ok=True)
        self._open(segment)

    def _place(self, item: _Item, at: int) -> Place:
        if (request_id := item.head.get("id")) is not None:
            self._ids.setdefault(self._segment, []).append(request_id)
        return Place(self._segment, records.record_of(item.head, item.payload, item.data, at))

    def _undo(self, before: int) -> None:
        """Back to the last whole record."""
        try:
            if self._segment != before:
                self._log(self._segment).unlink(missing_ok=True)
                if before >= 0:
                    self._open(before)
                else:
                    self.close()
                    self._segment = before
            elif self._descriptor is not None:
                os.ftruncate(self._descriptor, self._length)
        except OSError:
            log.exception("the journal %s could not be put right after a failed write", self.folder)

    def _open(self, segment: int) -> None:
        descriptor = os.open(self._log(segment), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.close()
        self._descriptor, self._segment = descriptor, segment
        self._length = os.fstat(descriptor).st_size

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # Reading --------------------------------------------------------------------------------------------------------

    def read(self) -> Found:
        """What is there, verified; a last record that was cut off is removed. Appending goes on after it."""
        numbers = sorted(int(file.stem) for file in self.folder.glob("*.log"))
        if not numbers:
            raise Damaged(f"{self.folder} is damaged: it holds no segment.")
        self.covered = max((n for n in numbers if self.state(n).is_dir()), default=-1)
        start = max(self.covered, numbers[0])
        headers: dict[int, Head] = {}
        old: list[Place] = []
        live: list[Place] = []
        damage: Damaged | None = None
        for n in numbers:
            found, wrong = self._read_segment(n, last=n == numbers[-1])
            if n > start and n - 1 not in headers:
                wrong = Damaged(f"{self.folder} is damaged: segment {n - 1} is missing.")
            if found:
                headers[n] = found[0].head
                (old if n < start else live).extend(Place(n, record) for record in found[1:])
            if wrong is not None and n >= start:
                damage = wrong
                break
            if wrong is not None:
                log.error("%s Some results are lost; the model itself is not.", wrong)
        if start not in headers:
            raise damage or Damaged(f"{self.folder} is damaged: segment {start} has no header.")
        if damage is None and (start > 0 and self.covered != start):
            raise Damaged(f"{self.folder} is damaged: {self.state(start)} is missing.")
        for place in (*old, *live):
            if (request_id := place.record.head.get("id")) is not None:
                self._ids.setdefault(place.segment, []).append(request_id)
        if damage is None:
            self._open(max(headers))
        return Found(headers[max(headers)]["created"], headers[start], old, live, damage)

    def _read_segment(self, number: int, last: bool) -> tuple[list[Record], Damaged | None]:
        file = self._log(number)
        try:
            found, length, wrong = records.read_all(file, may_be_cut=last)
        except OSError as error:
            return [], Damaged(f"{file} cannot be read: {error}.")
        if wrong is None and not found:  # its header was cut off: nothing was ever acknowledged in it
            file.unlink()
        elif wrong is None and length < file.stat().st_size:
            os.truncate(file, length)
        return found, wrong

    def payload(self, place: Place) -> bytes:
        return records.read_payload(self._log(place.segment), place.record)

    # Trimming -------------------------------------------------------------------------------------------------------

    def state(self, segment: int) -> Path:
        return self.folder / f"{segment:06d}.state"

    def newest_state(self) -> Path | None:
        return self.state(self.covered) if self.covered >= 0 else None

    def cover(self, segment: int) -> None:
        """The state at the beginning of this segment has been written: earlier ones are of no use any more."""
        self.covered = segment
        for folder in self.folder.glob("*.state"):
            if int(folder.stem) < segment:
                shutil.rmtree(folder, ignore_errors=True)
        for pin in self.folder.glob("*.pin"):
            if any(pin.stem in ids for n, ids in self._ids.items() if n < segment):
                shutil.rmtree(pin, ignore_errors=True)

    def trim(self, wanted: Callable[[str], bool]) -> None:
        """Deletes the oldest segments, as far as they are part of the state and nobody will ask for their results."""
        for n in sorted(int(file.stem) for file in self.folder.glob("*.log")):
            if n >= self.covered or any(map(wanted, self._ids.get(n, ()))):
                return
            self._log(n).unlink(missing_ok=True)
            self._ids.pop(n, None)

    def pin(self, request_id: str, source: Path) -> Path:
        """A folder of files that never change, kept as it is for as long as this request may have to be repeated."""
        pin = self.folder / f"{request_id}.pin"
        if not pin.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copytree(source, pin, copy_function=os.link)
            except (OSError, shutil.Error):  # another file system, or one without links
                shutil.rmtree(pin, ignore_errors=True)
                shutil.copytree(source, pin)
        return pin

    def delete(self) -> None:
        self.close()
        gone = self.folder.with_name(f".{self.folder.name}.gone")  # in one move: half a journal would be a damaged one
        try:
            self.folder.rename(gone)
        except OSError:
            gone = self.folder
        shutil.rmtree(gone, ignore_errors=True)

    def _log(self, segment: int) -> Path:
        return self.folder / f"{segment:06d}.log"


def _write_whole(disk: Disk, descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[disk.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tell(written: Written, outcome: Place | Busy) -> None:
    try:
        written(outcome)
    except Exception:  # one request's trouble must not hold up the records of others
        log.exception("a journalled request could not be taken further")
