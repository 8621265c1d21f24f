"""Messages between processes arrive whole and in order, however they were cut on the way."""

import random
import socket
import threading

import pytest

from mint.engine.pipe import Pipe


def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    ours, theirs = (Pipe(end) for end in socket.socketpair())
    rng = random.Random(0)
    batches = [[rng.randbytes(rng.choice([0, 1, 100, 300_000])) for _ in range(rng.randint(1, 5))] for _ in range(20)]

    def send() -> None:
        for batch in batches:
            ours.send(batch)
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    arrived: list[bytes] = []
    with pytest.raises(EOFError):
        while True:
            arrived += theirs.receive()
    sender.join()
    assert arrived == [message for batch in batches for message in batch]


def test_what_has_come_is_taken_in_one_read_and_half_a_message_waits_for_its_rest() -> None:
    one, other = socket.socketpair()
    ours, theirs = Pipe(one), Pipe(other)
    ours.send([b"first", b"second"])
    one.sendall((5).to_bytes(8, "big") + b"th")
    assert theirs.receive() == [b"first", b"second"]
    one.sendall(b"ird")
    assert theirs.receive() == [b"third"]
