"""Reading the answer out of a response, and grading it with partial credit.

Graders give 1 for right, 0 for wrong and something between for nearly; `mint.rl.rewards` weighs and combines them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_NUMBER = r"[-−+]?\$?(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+|\d+)(?:\.\d+)?|[-−+]?\$?\.\d+"
_LEADING = re.compile(rf"\s*(?:A:|[Aa]nswer\s*:)?\s*=?\s*({_NUMBER})(?!\s*[-+*/=^×÷−]|\.?\d|,\d)")
_MARKED = re.compile(rf"(?:####|[Aa]nswer(?:\s+is|\s*[:=])+)[\s*$:]*\\?\(?\s*({_NUMBER})")

_WRAPPING = re.compile(r"\\text\{[^}]*\}|\\[$%!]|\$|\{,\}|\\,|(?<=\d),(?=\d{3})|%$")


def extract_answer(text: str) -> str | None:
    """The answer a text gives, numbers in one spelling ("1,234.50" is "1234.5"); None if there is none.

    In this order: the last \\boxed{...}, number or not; the last number after "####" or "the answer is"; a number the
    text begins with, unless it begins a sum ("3 + 5 = 8"); the last number of all.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return canonical_number(boxed)
    marked = _MARKED.findall(text)
    if marked:
        return canonical_number(marked[-1])
    leading = _LEADING.match(text)
    if leading:
        return canonical_number(leading.group(1))
    # "7-5" holds 7 and 5, not -5: a sign right after a digit is an operator
    numbers = re.findall(rf"(?:(?<=[\d)])[-−+])?({_NUMBER})", text)
    return canonical_number(numbers[-1]) if numbers else None


def canonical_number(text: str) -> str:
    """A number without separators, currency, plus sign or idle zeros; other text only without its wrapping."""
    bare = _WRAPPING.sub("", text.strip().replace("−", "-")).strip()
    number = re.fullmatch(r"([-+]?)\s?(\d*)(?:\.(\d*))?", bare.rstrip("."))
    if not number or not (number.group(2) or number.group(3)):
        return bare
    sign, whole, fraction = number.group(1), number.group(2).lstrip("0") or "0", (number.group(3) or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if sign == "-" and value != "0" else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = text[start + len("\\boxed{") :]
    depth = 1
    for i, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:i]
    return None


# --------------------------------------------------------------------------------------------------------------------
# Graders with partial credit, all in [0, 1], 1 being right


def fraction_passed(results: Sequence[bool]) -> float:
    """The share of tests passed; 0 of none."""
    return sum(map(bool, results)) / len(results) if len(results) else 0.0


def exact_match(answer: str, gold: str | float) -> float:
    return float(extract_answer(answer) == canonical_number(str(gold)))


def digit_match(answer: str, gold: str | float) -> float:
    """The share of digits right, counted from the ones place, as carries run; a wrong sign is worth nothing."""
    given, wanted = extract_answer(answer), canonical_number(str(gold))
    if given is None or given.startswith("-") != wanted.startswith("-"):
        return 0.0
    given, wanted = given.lstrip("-"), wanted.lstrip("-")
    right = sum(a == b for a, b in zip(reversed(given), reversed(wanted), strict=False))
    return right / max(len(given), len(wanted))


def distance_credit(answer: str, gold: str | float, scale: float) -> float:
    """1 / (1 + distance / scale): at `scale` away, half."""
    given = extract_answer(answer)
    try:
        distance = abs(float(given) - float(canonical_number(str(gold)))) if given is not None else math.inf
    except ValueError:
        return 0.0
    return 1.0 / (1.0 + distance / scale)
