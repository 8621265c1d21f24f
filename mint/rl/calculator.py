"""A calculator as a tool: arithmetic on a syntax tree, never `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from mint.rl.tools import tool

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
MAX_EXPRESSION = 200  # characters
MAX_BITS = 4096  # of any number on the way


@tool
def calculator(expression: str) -> str:
    """Works out an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    return format_number(evaluate(expression))


def evaluate(expression: str) -> float | int:
    """By walking the syntax tree, so nothing but arithmetic can happen, and no number may grow without bound."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_EXPRESSION} are allowed")
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace("×", "*").replace("−", "-"), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return _value(tree.body)


def _value(node: ast.AST) -> float | int:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        result = _OPERATORS[type(node.op)](left, right)
        if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > MAX_BITS):
            raise ValueError("the result is not a number of reasonable size")
        return result
    raise ValueError(f"only numbers, + - * / // % ** and parentheses are understood, not {type(node).__name__}")


def _check_power(base: float | int, exponent: float | int) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > MAX_BITS:
        raise ValueError("the power is too large")


def format_number(value: float | int) -> str:
    """Whole floats without their point, others to 12 digits."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
