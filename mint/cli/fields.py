"""The fields of a configuration class with the sentence that stands under each in the source."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Field:
    name: str
    kind: str
    default: str
    meaning: str


def documented_fields(cls: Any) -> list[Field]:
    sentences = _sentences(cls)
    return [Field(f.name, str(f.type), _default(f), sentences.get(f.name, "")) for f in fields(cls)]


def _default(field: Any) -> str:
    return "must be given" if field.default is MISSING and field.default_factory is MISSING else str(field.default)


def _sentences(cls: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in pairwise(body.body):
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            continue
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
