"""How long the server waits, how much it keeps and how much it takes in: one place for every such number."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Limits:
    poll_seconds: float = 30.0
    """How long a poll for a result is held; clients give up on a poll after 45 s."""
    gap_seconds: float = 5.0
    """How long a model's requests wait for a sequence number that does not come."""
    load_wait_seconds: float = 5.0
    """How long a new sampling session waits to hear whether its model exists; clients give up after 60 s."""
    session_idle_seconds: float = 1800.0
    """A session without a heartbeat (clients send one every 10 s) or request for this long gives its memory back."""
    finished_idle_seconds: float = 60.0
    """The same for a session whose client said goodbye."""
    policy_idle_seconds: float = 1800.0
    """A policy that can be read from disk again leaves memory after this long without a sample."""
    snapshot_idle_seconds: float = 120.0
    """The same for a snapshot: loops take one a step and never come back to most of them."""
    delivered_seconds: float = 330.0
    """How long a fetched result can be fetched again; clients retry a request for at most 5 minutes."""
    delivered_bytes: int = 256 * MIB
    undelivered_seconds: float = 6 * 3600.0
    """How long a result waits for somebody to fetch it."""
    state_seconds: float = 30.0
    """How long a model goes on before its state is written anew: what recovery repeats at most, or the time writing it
    took, twenty times over, if that is more."""
    state_bytes: int = 64 * MIB
    """The same in bytes of requests."""
    room_seconds: float = 300.0
    """How long a new model waits for room on a full disk; clients retry a request for as long."""
    pending_samples: int = 65_536
    """Sequences asked for and not yet sampled, in all and by one session; beyond it samples are answered 429."""
    session_samples: int = 32_768
    pending_requests: int = 16_384
    """Training requests accepted and not yet answered: in all, by one session, on one model."""
    session_requests: int = 4096
    model_requests: int = 1024
    pending_bytes: int = 2 * GIB
    """What those requests hold, unpacked: in all, by one session, on one model."""
    session_bytes: int = GIB
    model_bytes: int = 512 * MIB
    refused_seconds: float = 60.0
    """How long a model's later requests wait for one that found no room and may be sent again."""
    least_free_memory: int = 256 * MIB
    """With less than this on the whole machine nothing new is taken in."""
    least_free_disk: int = 64 * MIB
    """With less than this the server says that it is not ready."""
    datums: int = 16_384
    """In one request."""
    batched_samples: int = 1024
    """Sample requests in one body; MinT's clients send 64."""
    connections: int = 10_000
    """At once, or half as many as the system lets the process open files, if that is less."""
    header_seconds: float = 20.0
    """How long the headers of a request may take to arrive."""
    body_seconds: float = 60.0
    """How long the next piece of a body may take to arrive, and the whole of it beyond what `body_rate` allows."""
    body_rate: int = 16 << 10
    """Bytes of a body a second below which a client is too slow."""
    send_seconds: float = 60.0
    """How long a client may take to read what it is sent, 64 KiB at a time."""
    sweep_seconds: float = 10.0
    keys_seconds: float = 1.0
    """How long a key that was made, changed or revoked by another process may go unnoticed."""
    link_seconds: float = 3600.0
    """How long a download link works."""
    token_seconds: float = 24 * 3600.0
    header_bytes: int = 64 << 10
    small_body_bytes: int = 4 * MIB
    body_bytes: int = 256 * MIB
    """Training data and prompts, before and after decompression."""
    upload_bytes: int = 16 * GIB
    """A checkpoint archive, and what it holds when unpacked."""
