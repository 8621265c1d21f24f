"""The journal's files: what is written is read back, what is damaged is named, what was cut off was never promised."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from mint.errors import Busy
from mint.server.journal import Disk, Journal, Place
from mint.server.records import Damaged

HEADER = {"kind": "segment", "created": {"model": "m"}, "next": 1, "handled": []}
REQUESTS = [({"kind": "request", "id": f"r{n}", "op": "optim_step", "seq": n}, bytes([n]) * 50) for n in range(1, 6)]


async def append(journal: Journal, head: dict, payload: bytes = b"", opens: bool = False) -> Place | Busy:
    done: asyncio.Future[Place | Busy] = asyncio.get_running_loop().create_future()
    if opens:
        journal.begin_segment(head, done.set_result)
    else:
        journal.append(head, payload, done.set_result)
    return await done


async def fill(journal: Journal) -> None:
    await append(journal, HEADER, opens=True)
    for head, payload in REQUESTS:
        await append(journal, head, payload)
    journal.close()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "m")
    asyncio.run(fill(journal))
    return journal


def file_of(journal: Journal, segment: int = 0) -> Path:
    return journal.folder / f"{segment:06d}.log"


def test_what_was_written_is_read_back(journal: Journal) -> None:
    again = Journal(journal.folder)
    found = again.read()
    assert found.created == {"model": "m"}
    assert [(p.record.head, again.payload(p)) for p in found.live] == REQUESTS
    assert found.damage is None


@pytest.mark.parametrize("cut", [1, 30, 51, 100])
def test_a_torn_last_record_is_cut_off_and_appending_goes_on(journal: Journal, cut: int) -> None:
    file = file_of(journal)
    os.truncate(file, file.stat().st_size - cut)
    again = Journal(journal.folder)
    assert [p.record.head["id"] for p in again.read().live] == ["r1", "r2", "r3", "r4"]
    asyncio.run(append(again, *REQUESTS[4]))
    assert [p.record.head["id"] for p in Journal(journal.folder).read().live] == ["r1", "r2", "r3", "r4", "r5"]


def test_a_tail_of_zeros_is_a_torn_record(journal: Journal) -> None:
    with file_of(journal).open("ab") as file:
        file.write(bytes(500))
    assert len(Journal(journal.folder).read().live) == 5


def test_every_flipped_bit_is_noticed_and_named(journal: Journal) -> None:
    file = file_of(journal)
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at % 8)
        file.write_bytes(flipped)
        try:
            found = Journal(journal.folder).read()
        except Damaged as error:  # in the header of the segment
            assert str(file) in str(error)
        else:
            assert found.damage is not None, f"a bit of byte {at} was flipped and nobody noticed"
            assert str(file) in str(found.damage)
            assert "record" in str(found.damage)
    file.write_bytes(whole)


def test_only_the_last_segment_may_be_torn(journal: Journal) -> None:
    again = Journal(journal.folder)
    again.read()
    asyncio.run(append(again, HEADER, opens=True))
    os.truncate(file_of(journal), file_of(journal).stat().st_size - 1)
    damage = Journal(journal.folder).read().damage
    assert damage is not None
    assert "000000.log is damaged: it ends within record 5" in str(damage)


def test_a_segment_whose_state_is_gone_is_not_taken_for_the_beginning(journal: Journal) -> None:
    again = Journal(journal.folder)
    again.read()
    asyncio.run(append(again, HEADER, opens=True))
    file_of(journal).unlink()
    with pytest.raises(Damaged, match=r"000001\.state is missing"):
        Journal(journal.folder).read()


def test_a_state_covers_the_segments_before_it_and_they_go_when_nobody_wants_their_results(journal: Journal) -> None:
    again = Journal(journal.folder)
    again.read()
    asyncio.run(append(again, HEADER | {"next": 6}, opens=True))
    again.state(1).mkdir()
    again.cover(1)
    found = Journal(journal.folder).read()
    assert (len(found.old), found.live, found.resume["next"]) == (5, [], 6)
    again.trim(lambda request_id: request_id == "r3")
    assert file_of(journal).exists()
    again.trim(lambda request_id: False)
    assert not file_of(journal).exists()
    assert Journal(journal.folder).read().old == []


class Full(Disk):
    """Takes so many bytes, and half of the write that is too much."""

    def __init__(self, room: int, sync_fails: bool = False) -> None:
        super().__init__()
        self.room, self.sync_fails = room, sync_fails

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(descriptor, data[: max(1, self.room)])
        self.room -= written
        return written

    def sync(self, descriptor: int) -> None:
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


@pytest.mark.parametrize("fault", [Full(60), Full(10**9, sync_fails=True)])
def test_a_record_that_does_not_fit_is_refused_whole_and_may_come_again(journal: Journal, fault: Full) -> None:
    again = Journal(journal.folder, fault)
    again.read()
    refused = asyncio.run(append(again, {"kind": "request", "id": "r6"}, bytes(500)))
    assert isinstance(refused, Busy)
    assert "make room" in str(refused)
    assert len(Journal(journal.folder).read().live) == 5
    fault.room, fault.sync_fails = 10**9, False
    assert isinstance(asyncio.run(append(again, {"kind": "request", "id": "r6"}, bytes(500))), Place)
    assert [p.record.head["id"] for p in Journal(journal.folder).read().live][-1] == "r6"


def test_a_segment_that_does_not_fit_leaves_the_one_before_in_use(journal: Journal) -> None:
    fault = Full(20)
    again = Journal(journal.folder, fault)
    again.read()
    assert isinstance(asyncio.run(append(again, HEADER, opens=True)), Busy)
    assert not file_of(journal, 1).exists()
    fault.room = 10**9
    asyncio.run(append(again, {"kind": "request", "id": "r6"}))
    assert len(Journal(journal.folder).read().live) == 6


def test_records_that_arrive_together_share_one_flush(tmp_path: Path) -> None:
    class Counting(Disk):
        flushes = 0

        def sync(self, descriptor: int) -> None:
            self.flushes += 1

    disk = Counting()
    order: list[int] = []

    async def run() -> None:
        journal = Journal(tmp_path / "m", disk)
        await append(journal, HEADER, opens=True)
        disk.flushes = 0
        last: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for n in range(100):
            journal.append({"n": n}, b"", lambda _, n=n: (order.append(n), n == 99 and last.set_result(None)))
        await last

    asyncio.run(run())
    assert order == list(range(100)), "they are heard of in the order they were written"
    assert disk.flushes <= 2
