"""Figures of the running server: counted as requests pass, gathered when somebody asks.

One set of figures, two forms: `/metrics` for Prometheus, and `/api/v1/mint/status` as JSON for `mint top` and the
dashboard. Whatever the engine knows is asked of it at most once every `ENGINE_SECONDS`, and a silent engine is waited
for no longer than `ENGINE_PATIENCE`: a page about a server in trouble must not hang with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mint import machine
from mint.doorbell import arriving
from mint.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from mint.server.state import Server

ENGINE_SECONDS = 2.0
ENGINE_PATIENCE = 2.0
ENGINE_SILENCE = 20.0
"""After so long without an answer the engine counts as gone; one step of it should not take longer."""
RATE_SECONDS = 30.0
"""Tokens a second are a mean over this long."""
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_COUNTERS = {
    "tokens_trained": "Tokens of forward_backward requests, by the present engine.",
    "tokens_sampled": "Tokens drawn, by the present engine.",
    "tokens_read_by_sampler": "Prompt tokens read, by the present engine.",
    "adapter_evictions": "Adapters that left the device, by the present engine.",
    "adapter_returns": "Adapters that came back to the device, by the present engine.",
    "policies_proved": "Policies whose sampler and trainer were shown to agree, by the present engine.",
    "policies_refused": "Policies that were refused because they did not, by the present engine.",
}
"""Of what the engine tells, that which only grows; the rest goes up and down."""


class Traffic:
    """Counts what passes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mint_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "mint_request_seconds",
            "Seconds from a request's arrival to the end of its answer; polls are held open on purpose.",
            ("route",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.flushes = Histogram(
            "mint_journal_flush_seconds",
            "Seconds a flush of a model's journal to disk took.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.under_way = Gauge("mint_requests_open", "Requests being answered now.", registry=self.registry)


_NOTHING = {"sessions": 0, "models": 0, "requests": 0, "samples": 0}


class Status:
    """What the server is doing, gathered on demand."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._started = time.time()
        self._asking: asyncio.Future[dict[str, float]] | None = None
        self._asked = 0.0
        self._engine: dict[str, float] = {}
        self._engine_seen = -ENGINE_SILENCE
        self._history: deque[tuple[float, int, float, float]] = deque()

    async def engine(self) -> dict[str, float]:
        """What the engine tells of itself, a few seconds old at most; empty if it does not answer."""
        now = time.monotonic()
        if self._asking is None and now - self._asked > ENGINE_SECONDS:
            self._asked = now
            self._asking = arriving(self._server.backend.stats())
            self._asking.add_done_callback(self._told)
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=ENGINE_PATIENCE)
        return self._engine if self._engine_answers else {}

    @property
    def _engine_answers(self) -> bool:
        return time.monotonic() - self._engine_seen < ENGINE_SILENCE

    def _told(self, asked: asyncio.Future[dict[str, float]]) -> None:
        self._asking = None
        if asked.cancelled() or asked.exception() is not None:
            return
        now, generation = time.monotonic(), self._server.backend.generation
        self._engine, self._engine_seen = asked.result(), now
        self._server.queues.engine = self._engine
        entry = (now, generation, self._engine.get("tokens_sampled", 0.0), self._engine.get("tokens_trained", 0.0))
        self._history.append(entry)
        while now - self._history[0][0] > RATE_SECONDS or self._history[0][1] != generation:
            self._history.popleft()

    def rates(self) -> tuple[float, float]:
        """Tokens sampled and trained a second."""
        if len(self._history) < 2:
            return 0.0, 0.0
        (start, _, sampled, trained), (end, _, sampled_now, trained_now) = self._history[0], self._history[-1]
        seconds = max(end - start, 1e-9)
        return (sampled_now - sampled) / seconds, (trained_now - trained) / seconds

    async def figures(self) -> dict[str, Any]:
        """The shape is described in docs/operations.md."""
        server, engine = self._server, await self.engine()
        sampled, trained = self.rates()
        waiting = server.queues.waiting()
        ready, reason = await self.readiness()
        return {
            "version": __version__,
            "uptime_seconds": round(time.time() - self._started, 1),
            "ready": ready,
            "not_ready_because": reason,
            "queue": {
                **server.queues.depths(),
                "results": len(server.futures),
                "queue_state": waiting.queue_state,
                "queue_state_reason": waiting.reason,
            },
            "tokens_per_second": {"sampled": round(sampled, 1), "trained": round(trained, 1)},
            "engine": engine | {"restarts": server.backend.generation},
            "adapters": {tier: _at(engine, tier) for tier in ("device", "host", "disk")},
            "memory": {
                "server_bytes": machine.process_memory(),
                "engine_bytes": int(engine.get("process_bytes", 0)),
                "device_bytes": int(engine.get("memory_bytes", 0)),
                "free_bytes": machine.free_memory(),
            },
            "disk_free_bytes": machine.free_disk(server.config.data),
            "models": server.models.overview(),
            "tenants": self._tenants(),
        }

    def _tenants(self) -> list[dict[str, Any]]:
        """Who has sessions, and how much each has under way."""
        server, under_way = self._server, self._server.queues.of_sessions()
        tenants: dict[str, dict[str, Any]] = {}
        for session_id, owner in server.sessions.owners().items():
            one = tenants.setdefault(owner, {"owner": owner, "name": server.keys.label(owner), **_NOTHING})
            one["sessions"] += 1
            for name in ("requests", "samples"):
                one[name] += under_way.get(session_id, {}).get(name, 0)
        for model in server.models.overview():
            if model["owner"] in tenants:
                tenants[model["owner"]]["models"] += 1
        return sorted(tenants.values(), key=lambda one: (-one["requests"] - one["samples"], one["name"]))

    async def readiness(self) -> tuple[bool, str | None]:
        """Whether the server can do its work, and if not, why."""
        server = self._server
        await self.engine()
        if not self._engine_answers:
            return False, "the engine does not answer: it is starting, busy with one long step, or gone"
        try:
            await asyncio.to_thread(server.store.check_writable)
        except Exception as error:  # whatever it is, it is the reason
            return False, f"the database cannot be written: {error}"
        free = machine.free_disk(server.config.data)
        if free < server.limits.least_free_disk:
            return False, f"{free >> 20} MiB are free on the disk of the data folder; make room"
        return True, None

    async def exposition(self) -> bytes:
        """For Prometheus."""
        gathered = CollectorRegistry()
        gathered.register(_Figures(await self.figures()))
        return generate_latest(self._server.traffic.registry) + generate_latest(gathered)


class _Figures(Collector):
    """The figures of one moment as metrics."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        told = self._figures
        yield _gauge("mint_ready", "1 if the server can do its work.", float(told["ready"]))
        yield _gauge("mint_uptime_seconds", "Seconds since the server started.", told["uptime_seconds"])
        for name in ("requests", "samples", "bytes"):
            yield _gauge(f"mint_queue_{name}", f"{name.capitalize()} accepted and not done.", told["queue"][name])
        yield _gauge("mint_results_kept", "Results under way or waiting to be fetched.", told["queue"]["results"])
        yield _gauge("mint_disk_free_bytes", "Free on the disk of the data folder.", told["disk_free_bytes"])
        yield CounterMetricFamily(
            "mint_engine_restarts", "Times the engine was started again.", value=told["engine"]["restarts"]
        )
        adapters = GaugeMetricFamily("mint_adapters", "Adapters by where they are.", labels=("residence",))
        sizes = GaugeMetricFamily("mint_adapter_bytes", "Bytes of adapters by where they are.", labels=("residence",))
        for tier, there in told["adapters"].items():
            adapters.add_metric((tier,), there["count"])
            sizes.add_metric((tier,), there["bytes"])
        memory = GaugeMetricFamily("mint_memory_bytes", "Memory by who has it.", labels=("of",))
        for name, amount in told["memory"].items():
            memory.add_metric((name.removesuffix("_bytes"),), amount)
        sessions = GaugeMetricFamily("mint_tenant_sessions", "Live sessions.", labels=("tenant",))
        work = GaugeMetricFamily("mint_tenant_under_way", "Work accepted and not done.", labels=("tenant", "kind"))
        for tenant in told["tenants"]:
            sessions.add_metric((tenant["name"],), tenant["sessions"])
            for kind in ("requests", "samples"):
                work.add_metric((tenant["name"], kind), tenant[kind])
        yield from (adapters, sizes, memory, sessions, work)
        yield from self._of_engine()

    def _of_engine(self) -> Iterable[Metric]:
        shown = ("restarts", "adapters", "adapter_bytes", "process_bytes", "memory_bytes")
        for name, value in self._figures["engine"].items():
            if name in _COUNTERS:
                yield CounterMetricFamily(f"mint_engine_{name}", _COUNTERS[name], value=value)
            elif not name.startswith(shown) or name == "adapters_waiting":
                yield _gauge(f"mint_engine_{name}", "As the engine tells it.", value)


def _at(engine: dict[str, float], tier: str) -> dict[str, int]:
    return {"count": int(engine.get(f"adapters_{tier}", 0)), "bytes": int(engine.get(f"adapter_bytes_{tier}", 0))}


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
