"""Moments as people type them: 12h or 30d from now or ago, or a date."""

from __future__ import annotations

import re
import time

import typer

_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def moment(option: str, text: str, ago: bool = False) -> float:
    """Seconds since 1970."""
    if span := re.fullmatch(r"(\d+)([smhdw])", text.strip()):
        seconds = int(span[1]) * _SPANS[span[2]]
        return time.time() + (-seconds if ago else seconds)
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; give 12h, 30d or a date such as 2027-01-31.") from None
