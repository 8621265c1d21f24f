"""Other people's tasks as our environments: one file each. Their packages are extras, imported only when asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from mint.errors import MintError


class MissingExtra(MintError, ImportError):
    """A task needs a package that is not installed."""


def require(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"these tasks need the package {module.split('.')[0]!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'mint-rl[{extra}]'"
        ) from error
