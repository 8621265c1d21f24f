"""Finds the folder that holds a model's files: bundled with the package, local, cached, or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

import mint
from mint.errors import NotFound

BUNDLED = {"mint/tiny": Path(mint.__file__).parent / "models" / "tiny"}

# What a model needs here; weights in other formats of the same repository stay where they are.
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

# Seconds before an unreachable Hub is given up on; a reachable one answers in well under one.
HUB_TIMEOUT = 5.0


def find_folder(name: str) -> Path:
    """The folder of model `name`: `mint/tiny`, a local path, or a Hub id (cache first, then download)."""
    for folder in (BUNDLED.get(name), Path(name).expanduser()):
        if folder is not None and folder.is_dir():
            return _checked(name, folder)
    if name in BUNDLED or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise _not_found(name, "there is no such folder, and it is not a Hub id (owner/name)")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
        if _complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        return _checked(name, Path(snapshot_download(name, allow_patterns=FILES, etag_timeout=HUB_TIMEOUT)))
    except (OSError, HfHubHTTPError) as error:  # LocalEntryNotFoundError and OfflineModeIsEnabled are OSErrors
        raise _not_found(name, f"it is not in the local cache and could not be downloaded ({error})") from error


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _checked(name: str, folder: Path) -> Path:
    if not _complete(folder):
        raise _not_found(name, f"{folder} lacks config.json or safetensors weights")
    return folder


def _not_found(name: str, why: str) -> NotFound:
    return NotFound(
        f"model {name!r} is not available: {why}. Download it where there is a network with `hf download {name}`, or give "
        "the path of a folder with config.json, tokenizer and safetensors. `mint/tiny` is bundled and needs no download."
    )
