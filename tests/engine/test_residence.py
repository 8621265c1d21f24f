"""More adapters than fit: who leaves, who comes back, and that nobody's numbers change by a bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import mint.engine.residence as residence_module
from mint.engine.device import Device
from mint.engine.engine import Engine
from mint.engine.holdings import Holding, Room, Tier
from mint.engine.residence import Pin, Residence
from mint.engine.spill import Spill
from mint.errors import Lost
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams
from tests.waiting import PATIENCE, eventually


class Thing:
    """An owner of two tensors."""

    def __init__(self, value: float, frozen: bool = False, size: int = 8) -> None:
        self.held = [torch.full((size,), value), torch.tensor([value])]
        self.frozen = frozen
        self.left = 0

    def tensors(self) -> list[Tensor]:
        return list(self.held)

    def put(self, tensors: Sequence[Tensor]) -> None:
        self.held = list(tensors)

    def leave_device(self) -> None:
        self.left += 1


class House:
    """A residence, and a stand-in for the worker that carries out what other threads send it."""

    def __init__(self, folder: Path, room: Room) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.residence = Residence(self._inbox.put, folder)
        self.residence.room = room

    def add(self, thing: Thing) -> Holding:
        holding, pin = self.residence.add(thing)
        pin.release()
        return holding

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._inbox.get(timeout=PATIENCE)()

    def ask(self, holding: Holding) -> tuple[list[Pin], Future[Any] | None]:
        """The pin, if it is granted at once, or what to wait for."""
        granted: list[Pin] = []
        steps = self.residence.acquire(holding)
        try:
            return granted, next(steps)
        except StopIteration as stop:
            return [stop.value], None

    def use(self, holding: Holding) -> Pin:
        pins, awaited = self.ask(holding)
        if awaited is None:
            return pins[0]
        self.until(awaited.done)
        return awaited.result()

    def at(self, tier: Tier) -> int:
        return int(self.residence.figures()[f"adapters_{tier.value}"])


@pytest.fixture
def house(tmp_path: Path):
    made: list[House] = []

    def make(**room: Any) -> House:
        made.append(House(tmp_path / "spill", Room(**room)))
        return made[-1]

    yield make
    for one in made:
        one.residence.close()


def test_the_one_unused_for_longest_leaves_and_comes_back_as_it_was(house: Callable[..., House]) -> None:
    here = house(device_adapters=2)
    things = [Thing(float(n)) for n in range(3)]
    first, second = here.add(things[0]), here.add(things[1])
    here.use(first).release()
    third = here.add(things[2])
    here.until(lambda: here.at(Tier.DISK) == 1)
    assert [h.tier for h in (first, second, third)] == [Tier.DEVICE, Tier.DISK, Tier.DEVICE]
    assert sum(t.numel() for t in things[1].tensors()) == 0  # nothing of it is left in memory
    here.use(second)
    assert torch.equal(things[1].held[0], torch.full((8,), 1.0)) and things[1].left == 1
    here.until(lambda: here.at(Tier.DEVICE) == 2)


def test_what_changed_after_it_came_back_is_what_leaves_the_next_time(house: Callable[..., House]) -> None:
    here = house(device_adapters=1)
    thing = Thing(1.0)
    mine = here.add(thing)
    for round_ in range(3):
        other = here.add(Thing(0.0))
        here.until(lambda: mine.tier is Tier.DISK)
        pin = here.use(mine)
        assert float(thing.held[0][0]) == 1.0 + round_
        thing.held = [tensor + 1 for tensor in thing.held]
        pin.release()
        here.residence.remove(other)


def test_what_is_in_use_stays_and_who_asks_for_more_waits_until_it_is_done(house: Callable[..., House]) -> None:
    here = house(device_adapters=1)
    first = here.add(Thing(1.0))
    pin = here.use(first)
    second_thing = Thing(2.0)
    second = here.add(second_thing)
    here.until(lambda: second.tier is Tier.DISK)
    _, awaited = here.ask(second)
    assert awaited is not None and not awaited.done() and first.tier is Tier.DEVICE
    assert here.residence.figures()["adapters_waiting"] == 1
    pin.release()
    here.until(awaited.done)
    assert first.tier is Tier.DISK and float(second_thing.held[1]) == 2.0


def test_a_place_in_line_is_not_overtaken_for_ever(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residence_module, "TURN_SECONDS", -1.0)  # its turn is over as soon as somebody waits
    here = house(device_adapters=1)
    popular = here.add(Thing(1.0))
    pin = here.use(popular)
    other = here.add(Thing(2.0))
    here.until(lambda: other.tier is Tier.DISK)
    _, awaited = here.ask(other)
    assert awaited is not None
    _, later = here.ask(popular)  # though it is on the device
    assert later is not None
    pin.release()
    here.until(awaited.done)
    assert not later.done()
    awaited.result().release()
    here.until(later.done)


def test_device_then_host_memory_then_disk(house: Callable[..., House]) -> None:
    size = 9 * 4
    here = house(device_bytes=2 * size, host_bytes=size)
    held = [here.add(Thing(float(n))) for n in range(4)]
    here.until(lambda: here.at(Tier.DISK) == 1)
    assert [h.tier for h in held] == [Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    here.use(held[0]).release()
    here.use(held[1]).release()
    here.until(lambda: here.at(Tier.DISK) == 1)
    assert here.at(Tier.DEVICE) == 2


def test_a_frozen_one_is_written_once_however_often_it_leaves(house: Callable[..., House]) -> None:
    here = house(device_adapters=1)
    frozen = here.add(Thing(3.0, frozen=True))
    other = here.add(Thing(4.0, frozen=True))
    here.until(lambda: frozen.tier is Tier.DISK)
    for _ in range(3):
        for mine, away in ((frozen, other), (other, frozen)):
            here.use(mine).release()
            here.until(lambda away=away: away.tier is Tier.DISK)
    assert len(list(here.residence._spill.folder.glob("*.safetensors"))) == 2


def test_the_files_of_those_who_are_gone_are_gone(house: Callable[..., House], tmp_path: Path) -> None:
    here = house(device_adapters=1)
    held = [here.add(Thing(float(n))) for n in range(5)]
    here.until(lambda: here.at(Tier.DISK) == 4)
    for holding in held:
        here.residence.remove(holding)
    assert not list((tmp_path / "spill").rglob("*.safetensors"))
    here.residence.close()
    assert not list((tmp_path / "spill").iterdir())


def test_what_a_killed_engine_left_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, alive = Spill(tmp_path), Spill(tmp_path)
    for spill in (dead, alive):
        spill.write([torch.ones(3)])
    assert dead._lock is not None
    os.close(dead._lock)  # as the system does when a process ends
    dead._lock = None
    third = Spill(tmp_path)
    assert not dead.folder.exists() and list(alive.folder.glob("*.safetensors"))
    alive.close()
    third.close()


def test_a_damaged_file_is_named_and_never_loaded(house: Callable[..., House]) -> None:
    here = house(device_adapters=1)
    mine, other = here.add(Thing(1.0)), here.add(Thing(2.0))
    here.until(lambda: mine.tier is Tier.DISK)
    (file,) = here.residence._spill.folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Lost, match=f"{file.name} is damaged"):
        here.use(mine)
    here.residence.remove(mine)
    here.use(other).release()


def test_with_a_full_disk_the_limit_is_exceeded_rather_than_anybody_kept_waiting(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = house(device_adapters=1)
    second_thing = Thing(2.0)
    first, second = here.add(Thing(1.0)), here.add(second_thing)
    here.until(lambda: first.tier is Tier.DISK)

    def full(tensors: Sequence[Tensor]) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(here.residence._spill, "write", full)
    here.use(first).release()
    assert first.tier is Tier.DEVICE and second.tier is Tier.DEVICE and float(second_thing.held[1]) == 2.0


# The engine ---------------------------------------------------------------------------------------------------------

RANKS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 24, 28, 31, 32, 40, 48, 56, 63, 64]
FAST = AdamParams(learning_rate=0.02)


def data_of(client: int, step: int) -> list[Datum]:
    tokens = [(7 * client + 11 * step + 3 * n) % 60 + 1 for n in range(9)]
    weights = [1.0] * (len(tokens) - 1)
    return [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})]


def ask_of(client: int) -> SampleRequest:
    params = SamplingParams(max_tokens=5, seed=client, stop=[])
    return SampleRequest(ModelInput.from_ints([5, 6, 7, client + 1]), params, num_samples=2)


class Client:
    """What one client asks for, a call at a time; results are kept as futures."""

    def __init__(self, engine: Engine, base: str, number: int, folder: Path) -> None:
        self.name, self.futures = f"client-{number}", []
        self._engine, self._number, self._folder = engine, number, folder
        self._base, self._lora = base, LoraConfig(rank=RANKS[number], seed=number)

    def calls(self) -> list[Callable[[], Future[Any]]]:
        engine, name, number = self._engine, self.name, self._number
        loss = "cross_entropy"
        return [
            lambda: engine.create_adapter(name, self._base, self._lora),
            lambda: engine.forward_backward(name, data_of(number, 0), loss, {}),
            lambda: engine.forward_backward(name, data_of(number, 1), loss, {}),  # gradients wait meanwhile
            lambda: engine.optim_step(name, FAST),
            lambda: engine.snapshot(name, f"{name}-a", str(self._folder / f"{name}-a") if number % 2 else None),
            lambda: engine.sample(f"{name}-a", ask_of(number)),
            lambda: engine.forward_backward(name, data_of(number, 2), loss, {}),
            lambda: engine.optim_step(name, FAST),
            lambda: engine.snapshot(name, f"{name}-b"),
            lambda: engine.sample(f"{name}-b", ask_of(number)),
            lambda: engine.sample(f"{name}-a", ask_of(number)),  # the older policy still serves
            lambda: engine.forward_backward(name, data_of(number, 3), loss, {}),
            lambda: engine.save_state(name, str(self._folder / name)),
        ]

    def results(self) -> list[Any]:
        told: list[Any] = []
        for future in self.futures:
            result = future.result(PATIENCE)
            if hasattr(result, "loss_fn_outputs"):
                told.append((result.metrics["loss:sum"], result.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()))
            elif hasattr(result, "sequences"):
                told.append([(s.tokens, s.logprobs) for s in result.sequences])
        return told

    def state(self) -> dict[str, Tensor]:
        files = sorted((self._folder / self.name).glob("*.safetensors"))
        return {f"{file.name}/{key}": tensor for file in files for key, tensor in load_file(file).items()}


def test_twenty_clients_of_ranks_1_to_64_where_four_fit_get_what_they_would_get_alone(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = str(tiny_folder("qwen3"))
    alone_engine = Engine([base], room=Room())
    alone = [Client(alone_engine, base, n, tmp_path / "alone") for n in range(20)]
    for client in alone:
        for call in client.calls():
            client.futures.append(call())
            client.futures[-1].result(PATIENCE)
        client.results()
        alone_engine.release(client.name).result(PATIENCE)
    crowded_engine = Engine([base], room=Room(device_adapters=4), spill=tmp_path / "spill")
    crowd = [Client(crowded_engine, base, n, tmp_path / "crowd") for n in range(20)]
    for calls in zip(*(client.calls() for client in crowd), strict=True):
        for client, call in zip(crowd, calls, strict=True):
            client.futures.append(call())  # nobody waits for anybody
    for one, many in zip(alone, crowd, strict=True):
        assert many.results() == one.results(), one.name
        expected, found = one.state(), many.state()
        assert list(found) == list(expected) and any("gradients" in key for key in found)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), one.name

    def settled() -> bool:
        stats = crowded_engine.stats().result(PATIENCE)
        return stats["adapters_device"] <= 4 and stats["adapters_device"] + stats["adapters_disk"] == 60

    eventually(settled)  # the last of them may still be on their way to disk
    assert crowded_engine.stats().result(PATIENCE)["adapter_returns"] > 20
    for client in crowd:
        for name in (client.name, f"{client.name}-a", f"{client.name}-b"):
            crowded_engine.release(name).result(PATIENCE)
    eventually(lambda: not list((tmp_path / "spill").rglob("*.safetensors")))
    crowded_engine.close()
    alone_engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_adapters_that_left_the_gpu_come_back_as_they_went(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = str(tiny_folder("qwen3"))
    sides = {}
    for side, room in (("all fit", Room()), ("two fit", Room(device_adapters=2))):
        engine = Engine(
            [base], Device(torch.device("cuda"), torch.float32, "asked for"), room=room, spill=tmp_path / "s"
        )
        sides[side] = [Client(engine, base, n, tmp_path / side) for n in range(0, 20, 4)]
        for calls in zip(*(client.calls() for client in sides[side]), strict=True):
            for client, call in zip(sides[side], calls, strict=True):
                client.futures.append(call())
                client.futures[-1].result(PATIENCE)  # one at a time, so that the company is the same on both sides
        stats = engine.stats().result(PATIENCE)
        assert (stats["adapter_returns"] > 10) == (side == "two fit")
        for client in sides[side]:
            client.results()
        engine.close()
    for fit, crowded in zip(sides["all fit"], sides["two fit"], strict=True):
        torch.testing.assert_close(crowded.results(), fit.results(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(crowded.state(), fit.state(), rtol=1e-5, atol=1e-6)


def test_an_adapter_lost_on_disk_is_told_as_lost_and_can_be_made_again(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = str(tiny_folder("qwen3"))
    engine = Engine([base], room=Room(device_adapters=1), spill=tmp_path / "spill")
    for name in ("one", "two"):
        engine.create_adapter(name, base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
        engine.forward_backward(name, data_of(1, 1), "cross_entropy", {}).result(PATIENCE)
    eventually(lambda: engine.stats().result(PATIENCE)["adapters_disk"] >= 1)
    for file in (tmp_path / "spill").rglob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(Lost):
        engine.optim_step("one", FAST).result(PATIENCE)
    engine.create_adapter("one", base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
    assert engine.optim_step("one", FAST).result(PATIENCE)["optim/skipped"] == 1.0
    engine.close()
