"""Which adapters are on the device, which in host memory, which on disk: more of them than fit, nobody the wiser.

Whoever computes with an adapter holds a `Pin` on it; the others may leave, the one unused for longest first, and come
back before they are used again, to the last bit. What leaves the device goes to host memory, from there to disk. When
all that is on the device is pinned, whoever asks for another waits in line; work in progress ends, so the line moves.

Everything here runs on the worker but the reading and writing of files, which has threads of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from mint.engine.faults import as_mint_error
from mint.engine.holdings import Holding, Owner, Room, Stored, Tier
from mint.engine.lanes import Steps
from mint.engine.spill import Spill, SpilledFile, placeholder
from mint.machine import give_back_memory

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0
"""So long those on the device may go on being used anew while somebody waits for a place: less, and a client's
samples of one policy would be loaded for one by one; more, and the others wait longer."""
FULL_DISK_SECONDS = 30.0
"""So long after a write failed the limits are exceeded rather than anybody kept waiting."""
GIVE_BACK_SECONDS = 10.0
"""So often memory that adapters have left is returned to the system, which takes milliseconds."""


class Pin:
    """Keeps an adapter on the device until it is released, once or more often."""

    def __init__(self, residence: Residence, holding: Holding) -> None:
        self._residence: Residence | None = residence
        self._holding = holding

    def release(self) -> None:
        """On the worker."""
        residence, self._residence = self._residence, None
        if residence is not None:
            residence._unpin(self._holding)


class Residence:
    def __init__(self, call_soon: Callable[[Callable[[], None]], None], folder: Path | None = None) -> None:
        """`call_soon` brings a call from any thread to the worker."""
        self.room = Room()
        self._call_soon = call_soon
        self._spill = Spill(folder)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mint-residence")
        self._holdings: set[Holding] = set()
        self._line: deque[Holding] = deque()
        self._failed = -FULL_DISK_SECONDS
        self._gave_back = time.monotonic()
        self.evictions = self.returns = 0

    # For those who use adapters -------------------------------------------------------------------------------------

    def add(self, owner: Owner) -> tuple[Holding, Pin]:
        """A new adapter, on the device, which may have one too many until the pin is released."""
        holding = Holding(owner)
        self._holdings.add(holding)
        return holding, self._pin(holding)

    def acquire(self, holding: Holding) -> Steps:
        """Returns a `Pin` once the adapter is on the device, waiting if need be."""
        late = self._line and time.monotonic() - self._line[0].since > TURN_SECONDS
        if holding.tier is Tier.DEVICE and not late:
            return self._pin(holding)
        granted: Future[Pin] = Future()
        if not holding.waiting:
            holding.since = time.monotonic()
            self._line.append(holding)
        holding.waiting.append(granted)
        self._move_on()
        if not granted.done():
            yield granted
        return granted.result()

    def keep_copy(self, holding: Holding, stored: Stored) -> None:
        """Somebody else has written what it holds, and leaves it there as long as the adapter lives."""
        if holding.owner.frozen and holding.stored is None:
            holding.stored = stored

    def remove(self, holding: Holding) -> None:
        """The adapter is forgotten, when the last who has or waits for it is done."""
        holding.gone = True
        self._forget_if_done(holding)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._spill.close()

    def figures(self) -> dict[str, float]:
        counts = {f"adapters_{tier.value}": float(sum(h.tier is tier for h in self._holdings)) for tier in Tier}
        sizes = {f"adapter_bytes_{tier.value}": float(self._bytes_at(tier)) for tier in Tier}
        return (
            counts
            | sizes
            | {
                "adapters_waiting": float(len(self._line) + sum(h.arriving for h in self._holdings)),
                "adapters_limit": float(self.room.device_adapters or 0),
                "adapter_evictions": float(self.evictions),
                "adapter_returns": float(self.returns),
            }
        )

    def pin(self, holding: Holding) -> Pin:
        """One more pin on an adapter that somebody has pinned already."""
        assert holding.pins, "the adapter may be anywhere"
        return self._pin(holding)

    def _bytes_at(self, tier: Tier) -> int:
        return sum(h.bytes for h in self._holdings if h.tier is tier)

    # Pins -----------------------------------------------------------------------------------------------------------

    def _pin(self, holding: Holding) -> Pin:
        holding.pins += 1
        holding.epoch += 1
        holding.used = time.monotonic()
        if not holding.owner.frozen:
            self._drop_copy(holding)
        return Pin(self, holding)

    def _unpin(self, holding: Holding) -> None:
        holding.pins -= 1
        holding.bytes = _size(holding.owner)  # gradients may have come or gone
        self._forget_if_done(holding)
        self._move_on()

    def _forget_if_done(self, holding: Holding) -> None:
        if holding.gone and not (holding.pins or holding.waiting):
            self._drop_copy(holding)
            self._holdings.discard(holding)

    def _drop_copy(self, holding: Holding) -> None:
        holding.stored = None
        if holding.spilled is not None:
            holding.spilled.delete()
            holding.spilled = None

    # The line -------------------------------------------------------------------------------------------------------

    def _move_on(self) -> None:
        """Serves the line as far as there is room, then sends away what is too much."""
        while self._line and self._serve(self._line[0]):
            self._line.popleft()
        while self._excess() and (victim := self._victim()) is not None:
            self._evict(victim)
        self._relieve_host()

    def _serve(self, holding: Holding) -> bool:
        if holding.tier is not Tier.DEVICE:
            while not self._fits(holding):
                if not self._will_fit(holding) and (victim := self._victim()) is not None:
                    self._evict(victim)
                    continue
                if not self._can_only_exceed():
                    return False  # somebody is on the way out, or will be when its work is done
                break
            self._bring(holding)
        if holding.tier is Tier.DEVICE:
            self._grant(holding)
        return True

    def _grant(self, holding: Holding) -> None:
        waiting, holding.waiting = holding.waiting, []
        for granted in waiting:
            granted.set_result(self._pin(holding))

    def _fits(self, holding: Holding) -> bool:
        return self.room.takes_one_more([h.bytes for h in self._holdings if h.takes_place], holding.bytes)

    def _will_fit(self, holding: Holding) -> bool:
        """Once those on their way out are out."""
        staying = [h.bytes for h in self._holdings if h.takes_place and not self._leaving(h)]
        return self.room.takes_one_more(staying, holding.bytes)

    def _excess(self, also_leaving: bool = False) -> bool:
        staying = [h for h in self._holdings if h.takes_place and (also_leaving or not self._leaving(h))]
        return self.room.is_exceeded([h.bytes for h in staying])

    def _crowded(self, tier: Tier) -> bool:
        """Whether somebody still has to leave, now that one of them has been written."""
        if tier is Tier.HOST:
            return self.room.host_bytes is not None and self._bytes_at(tier) > self.room.host_bytes
        return self._excess(also_leaving=True) or bool(self._line and not self._fits(self._line[0]))

    def _can_only_exceed(self) -> bool:
        """The disk takes nothing and there is nobody to wait for."""
        return time.monotonic() - self._failed < FULL_DISK_SECONDS and not any(h.writing for h in self._holdings)

    # Going ----------------------------------------------------------------------------------------------------------

    def _victim(self, tier: Tier = Tier.DEVICE) -> Holding | None:
        if tier is Tier.DEVICE and self.room.host_bytes == 0 and time.monotonic() - self._failed < FULL_DISK_SECONDS:
            return None
        idle = [h for h in self._holdings if h.tier is tier and self._may_leave(h) and not h.writing]
        return min(idle, key=lambda h: h.used, default=None)

    def _may_leave(self, holding: Holding) -> bool:
        """Also while somebody waits for it further back in the line: else those before would wait for ever."""
        return not holding.pins and not (self._line and self._line[0] is holding)

    def _leaving(self, holding: Holding) -> bool:
        return holding.writing and self._may_leave(holding)

    def _evict(self, holding: Holding) -> None:
        """From the device: at once if there is host memory or a copy on disk, else when it has been written."""
        tensors = holding.owner.tensors()
        holding.devices = [tensor.device for tensor in tensors]
        if holding.stored is not None:
            self._take_away(holding)
        elif self.room.host_bytes == 0:
            self._write(holding)
        else:
            self._send_to_host(holding, tensors)

    def _send_to_host(self, holding: Holding, tensors: Sequence[Tensor]) -> None:
        try:
            copies = [tensor.detach().cpu() for tensor in tensors]
        except (RuntimeError, MemoryError) as error:
            log.warning("no host memory for an idle adapter, which goes to disk: %s", error)
            self._write(holding)
            return
        self.evictions += 1
        holding.owner.leave_device()
        holding.owner.put(copies)
        holding.tier = Tier.HOST

    def _relieve_host(self) -> None:
        most = self.room.host_bytes
        if most is None:
            return
        while True:
            there = [h for h in self._holdings if h.tier is Tier.HOST and not self._leaving(h)]
            if sum(h.bytes for h in there) <= most or time.monotonic() - self._failed < FULL_DISK_SECONDS:
                return
            if (victim := self._victim(Tier.HOST)) is None:
                return
            if victim.stored is not None:
                self._take_away(victim)
            else:
                self._write(victim)

    def _write(self, holding: Holding) -> None:
        holding.writing = True
        epoch = holding.epoch
        written = self._threads.submit(self._spill.write, holding.owner.tensors())
        written.add_done_callback(lambda done: self._call_soon(partial(self._written, holding, epoch, done)))

    def _written(self, holding: Holding, epoch: int, done: Future[SpilledFile]) -> None:
        holding.writing = False
        if (error := done.exception()) is not None:
            self._failed = time.monotonic()
            log.warning("an idle adapter stays in memory: %s", error)
        elif holding.gone or (epoch != holding.epoch and not holding.owner.frozen):
            done.result().delete()
        else:
            holding.stored = holding.spilled = done.result()
            if self._may_leave(holding) and self._crowded(holding.tier):
                self._take_away(holding)
        self._move_on()

    def _take_away(self, holding: Holding) -> None:
        """Out of memory: there is a copy on disk."""
        self.evictions += 1
        owner = holding.owner
        if holding.tier is Tier.DEVICE:
            owner.leave_device()
        owner.put([placeholder(tensor) for tensor in owner.tensors()])
        holding.tier = Tier.DISK
        if time.monotonic() - self._gave_back > GIVE_BACK_SECONDS:
            self._gave_back = time.monotonic()
            self._threads.submit(give_back_memory)

    # Coming back ----------------------------------------------------------------------------------------------------

    def _bring(self, holding: Holding) -> None:
        """To the device: at once from host memory, from disk in a while."""
        if holding.tier is Tier.HOST:
            self._place(holding, holding.owner.tensors)
            return
        assert holding.stored is not None
        holding.arriving = True
        read = self._threads.submit(holding.stored.read)
        read.add_done_callback(lambda done: self._call_soon(partial(self._arrived, holding, done)))

    def _arrived(self, holding: Holding, done: Future[list[Tensor]]) -> None:
        holding.arriving = False
        self._place(holding, done.result)
        if holding.tier is Tier.DEVICE:
            self._grant(holding)
        self._forget_if_done(holding)
        self._move_on()

    def _place(self, holding: Holding, tensors: Callable[[], list[Tensor]]) -> None:
        """A border: whoever waits for it must hear that it could not be read, or does not fit."""
        try:
            placed = [tensor.detach().to(device) for tensor, device in zip(tensors(), holding.devices, strict=True)]
        except Exception as error:
            log.error("an adapter could not be brought back: %s", error)
            waiting, holding.waiting = holding.waiting, []
            for granted in waiting:
                granted.set_exception(as_mint_error(error))
            return
        self.returns += 1
        holding.owner.put(placed)
        holding.tier = Tier.DEVICE


def _size(owner: Owner) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in owner.tensors())
