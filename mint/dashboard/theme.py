"""How things look: colours, number formats, the words of status. No page is built here."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

PALETTE = ("#12a37f", "#5b7cfa", "#f59e0b", "#e0559a", "#8b5cf6", "#0ea5c6", "#ef6b4a", "#84a316", "#94672f", "#64748b")
"""Of curves; each is legible on white and on near-black."""
AXIS = "#8592a6"
GRID = "rgba(133,146,166,.16)"
SEVERITY: Mapping[str, str] = {"alarm": "#e5484d", "warning": "#f59e0b", "notice": "#5b7cfa"}
STATUS_WORDS: Mapping[str, str] = {
    "running": "New lines are arriving.",
    "finished": "All steps are done.",
    "stopped": "Nothing was written for a while and the last step was not reached. Run the same again to resume it.",
    "starting": "The configuration is written; the first step is not finished yet.",
    "unreadable": "Its config.json cannot be read.",
}
NOTHING = "–"
CHAT_MARKS = re.compile(r"<\|[^|<>]*\|>")


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, in the shortest form a person reads at once."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace(",", "\u2009").replace("-", "−")
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0)
    return f"{value:,.{decimals}f}".replace(",", "\u2009").replace("-", "−")


def signed(value: float | None) -> str:
    return NOTHING if value is None else number(value) if value <= 0 else f"+{number(value)}"


def percent(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def duration(seconds: float | None) -> str:
    """Two units at most."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def ago(moment: float) -> str:
    passed = max(time.time() - moment, 0)
    return "just now" if passed < 5 else f"{duration(passed)} ago"


def size(count: float | None) -> str:
    """Bytes."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def preview(text: str, length: int) -> str:
    """A prompt in a list, without the marks of its chat template."""
    return short(CHAT_MARKS.sub(" ", text), length)


def short(text: str, length: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"
