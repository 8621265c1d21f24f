"""Importing transformers takes seconds. This leaves out what makes no difference to what is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getmodulename


@contextmanager
def quick_imports() -> Iterator[None]:
    # transformers imports it where it is installed, which takes half a second, for things that are not done here.
    sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
    # Asked once by transformers, for which it makes an object of every file of every installed package: 0.3 s. Can go
    # when transformers asks for the packages it wants to know about, or the library looks at names alone.
    thorough = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = distributions_of_packages
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = thorough


def distributions_of_packages() -> dict[str, list[str]]:
    """Which distributions each top-level package came with, as `importlib.metadata.packages_distributions` says it.
    Folders without Python in them are told as well, as they are there from Python 3.12 on."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = _name_of(distribution)
        for package in _packages_in(distribution):
            found.setdefault(package, []).append(name)
    return found


def _packages_in(distribution: importlib.metadata.Distribution) -> set[str]:
    if told := distribution.read_text("top_level.txt"):
        return set(told.split())
    record = distribution.read_text("RECORD")
    files = map(str, distribution.files or ()) if record is None else (x.split(",", 1)[0] for x in record.splitlines())
    tops = {file.split("/", 1)[0] if "/" in file else getmodulename(file) or file for file in files}
    return {top for top in tops if "." not in top}


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    """Read off the first lines, which is all there is to it; parsing them all takes longer than anything else here."""
    text = distribution.read_text("METADATA") or ""
    for line in text[: text.find("\n\n") + 1].splitlines():
        if line.startswith("Name: "):
            return line.removeprefix("Name: ").strip()
    return distribution.metadata["Name"]
