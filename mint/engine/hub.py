"""Finds the folder that holds a model's files: bundled with the package, local, cached, or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from mint.errors import NotFound

BUNDLED = {"mint/tiny": Path(__file__).parents[1] / "models" / "tiny"}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# What a model needs here; weights in other formats of the same repository stay where they are.
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

# Seconds before an unreachable Hub is given up on; a reachable one answers in well under one.
HUB_TIMEOUT = 5.0


def find_folder(name: str) -> Path:
    """The folder of model `name`: `mint/tiny`, a local path, or a Hub id (cache first, then download)."""
    for folder in (BUNDLED.get(name), Path(name).expanduser()):
        if folder is not None and folder.is_dir():
            return _checked(name, folder)
    if name in BUNDLED or not _HUB_ID.fullmatch(name):
        raise _not_found(name, "there is no such folder, and it is not a Hub id (owner/name)")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
        if _complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        # Asked here with a timeout of our own: inside snapshot_download this first question may wait for ever.
        commit = HfApi().model_info(name, timeout=HUB_TIMEOUT).sha
        folder = Path(snapshot_download(name, revision=commit, allow_patterns=FILES, etag_timeout=HUB_TIMEOUT))
    except Exception as error:  # which HTTP library raises what is the Hub client's own business
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise _not_found(name, f"it is not in the local cache and could not be downloaded ({reason})") from error
    return _checked(name, folder)


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _checked(name: str, folder: Path) -> Path:
    if not _complete(folder):
        raise _not_found(name, f"{folder} lacks config.json or safetensors weights")
    return folder


def _not_found(name: str, why: str) -> NotFound:
    fetch = f"`hf download {name}` fetches it where there is a network; or give" if _HUB_ID.fullmatch(name) else "Give"
    return NotFound(
        f"model {name!r} is not available: {why}. {fetch} the path of a folder with config.json, tokenizer and "
        "safetensors. `mint/tiny` is bundled and needs no download."
    )
