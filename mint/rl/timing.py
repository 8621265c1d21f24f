"""Where the time of a step goes: named spans, their sums as metrics, the spans themselves on disk.

`timing_spans.jsonl` always; with `trace`, also `trace_events.jsonl`, which chrome://tracing and Perfetto open; every
`chart_every` steps a chart, `timing_NNNNNN.html`.
"""

from __future__ import annotations

import html
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mint.rl.rundir import RunDir, append_jsonl, write_whole


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    """Seconds since the run began."""
    seconds: float


class Timer:
    """Collects the spans of the step under way."""

    def __init__(self, run_dir: RunDir, trace: bool = False, chart_every: int = 0) -> None:
        self.run_dir = run_dir
        self.trace = trace
        self.chart_every = chart_every
        self.origin = time.monotonic()
        self.step_start = self.origin
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(name, start - self.origin, time.monotonic() - start))

    def finish_step(self, step: int) -> dict[str, float]:
        """The step's `time/...` metrics; its spans go to disk and are forgotten."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            by_name[span.name].append(span.seconds)
        now = time.monotonic()
        metrics = {"time/total": now - self.step_start}
        for name, seconds in by_name.items():
            metrics[f"time/{name}:total"] = sum(seconds)
            if len(seconds) > 1:
                metrics |= {
                    f"time/{name}:count": len(seconds),
                    f"time/{name}:mean": sum(seconds) / len(seconds),
                    f"time/{name}:max": max(seconds),
                }
        self._write(step)
        self.spans, self.step_start = [], now
        return metrics

    def _write(self, step: int) -> None:
        spans = [{"name": s.name, "start": round(s.start, 6), "seconds": round(s.seconds, 6)} for s in self.spans]
        append_jsonl(self.run_dir.spans_file, {"step": step, "spans": spans})
        if self.trace:
            for span in self.spans:
                event = {"name": span.name, "ph": "X", "ts": span.start * 1e6, "dur": span.seconds * 1e6}
                append_jsonl(self.run_dir.trace_file, event | {"pid": 1, "tid": 1, "args": {"step": step}})
        if self.chart_every and step % self.chart_every == 0:
            write_whole(self.run_dir.path / f"timing_{step:06d}.html", chart(step, self.spans))


def chart(step: int, spans: list[Span]) -> str:
    """The spans of a step as bars on one time axis: a page that needs nothing else."""
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.start + span.seconds for span in spans), default=begin) - begin or 1.0
    rows = []
    for number, span in enumerate(sorted(spans, key=lambda span: span.start)):
        left, width, top = 800 * (span.start - begin) / length, max(800 * span.seconds / length, 1), 24 * number
        label = f"{html.escape(span.name)} {span.seconds:.3f} s"
        rows.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="18" fill="#4c78a8"/>'
            f'<text x="810" y="{top + 14}" font-size="13">{label}</text>'
        )
    drawing = f'<svg width="1100" height="{24 * len(rows) + 4}" font-family="sans-serif">{"".join(rows)}</svg>'
    return f"<!doctype html><title>Step {step}</title><h3>Step {step}: {length:.3f} s</h3>{drawing}\n"
