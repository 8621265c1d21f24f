"""`mint info`: the machine, versions, devices; what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import typer

from mint.cli.output import AsJson, print_json, print_table, waiting
from mint.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "httpx", "sqlalchemy")
OPTIONAL = {
    "matplotlib": ("mint plot", "pip install 'mint-rl[plots]'"),
    "math_verify": ("mathematical equality of answers", "pip install 'mint-rl[envs]'"),
    "reasoning_gym": ("reasoning-gym environments", "pip install 'mint-rl[envs]'"),
    "verifiers": ("verifiers environments", "pip install 'mint-rl[verifiers]'"),
    "tensorboard": ("--loggers tensorboard", "pip install 'mint-rl[tensorboard]'"),
    "wandb": ("--loggers wandb", "pip install 'mint-rl[wandb]'"),
    "trackio": ("--loggers trackio", "pip install 'mint-rl[trackio]'"),
    "marimo": ("the notebooks in tutorials/", "pip install 'mint-rl[tutorials]'"),
}
"""Import name -> what it is for, how to get it."""


def info(as_json: AsJson = False) -> None:
    """Show what there is, and for what there is not, what it would be for and how to get it."""
    with waiting("looking at this machine"):
        facts, missing = _facts(), _missing()
    if as_json:
        return print_json(facts | {"missing": missing})
    print_table(("what", "is"), [(name, value) for name, value in facts.items()])
    if missing:
        typer.echo("\nNot here (all optional):")
        print_table(("what", "for", "get it with"), [(m["what"], m["for"], m["get"]) for m in missing])


def _facts() -> dict[str, Any]:
    from mint.config import ClientConfig, data_home
    from mint.engine.native.library import library

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _memory()
    facts: dict[str, Any] = {
        "mint": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": cores,
        "memory": f"{memory:.1f} GiB" if memory else "unknown",
        "device": _device(),
        "sampling and training on the CPU": library().reason,
        "data": str(data_home()),
        "server": ClientConfig.resolve().base_url or "none set: each command starts its own on this machine",
    }
    return facts | {name: _version(name) for name in PACKAGES}


def _device() -> str:
    from mint.engine.device import pick_device

    try:
        device = pick_device()
    except RuntimeError as error:  # a driver that is there and does not work
        return f"unusable: {error}"
    return f"{device.torch_device}, {str(device.dtype).removeprefix('torch.')} ({device.reason})"


def _memory() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _missing() -> list[dict[str, str]]:
    gone = [
        {"what": name.replace("_", "-"), "for": purpose, "get": how}
        for name, (purpose, how) in OPTIONAL.items()
        if find_spec(name) is None
    ]
    if shutil.which("bwrap") is None:
        how = "apt install bubblewrap, or your system's package manager"
        gone.append({"what": "bubblewrap", "for": "running a model's code (mint train code)", "get": how})
    import torch

    if not torch.cuda.is_available():
        gone.append({"what": "CUDA", "for": "models beyond a few hundred million parameters", "get": "an NVIDIA GPU"})
    return gone
