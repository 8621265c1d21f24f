"""`mint models`: what a server serves, or what this machine has."""

from __future__ import annotations

from typing import Any

import typer

from mint.cli.output import Address, AsJson, print_json, print_table


def models(base_url: Address = None, as_json: AsJson = False) -> None:
    """List the models of a server; where no address is set, those on this machine that need no download."""
    from mint.config import ClientConfig

    address = ClientConfig.resolve(base_url).base_url
    found = _on_server(address) if address else _here()
    if as_json:
        return print_json(found)
    print_table(("model", "context", "where"), [(m["name"], m["context"], m["where"]) for m in found], ("context",))
    if not address:
        typer.echo("\nAny Hub id or folder works too: mint serve --model Qwen/Qwen3-0.6B")


def _on_server(address: str) -> list[dict[str, Any]]:
    import mint

    with mint.ServiceClient(address) as service:
        known = service.get_server_capabilities().supported_models
    return [{"name": m.model_name, "context": m.max_context_length, "where": address} for m in known]


def _here() -> list[dict[str, Any]]:
    """The bundled model and whatever the Hub's cache holds whole."""
    import json
    from pathlib import Path

    import mint
    from mint.config import hub_cache

    package = Path(mint.__file__).parent
    folders = {"mint/tiny": package / "models" / "tiny"}
    for folder in sorted(hub_cache().glob("models--*/snapshots/*")):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            folders[folder.parent.parent.name.removeprefix("models--").replace("--", "/")] = folder
    return [
        {
            "name": name,
            "context": json.loads((folder / "config.json").read_text()).get("max_position_embeddings"),
            "where": "bundled" if name == "mint/tiny" else str(folder),
        }
        for name, folder in folders.items()
    ]
