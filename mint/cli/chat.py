"""`mint chat [WHAT]`: talk to a base model, a checkpoint, or the latest checkpoint of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.output import Address, waiting

if TYPE_CHECKING:
    import mint


def chat(
    what: Annotated[
        str, typer.Argument(help="A base model, a tinker:// path, or a run directory for its latest checkpoint.")
    ] = "mint/tiny",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Say this, print the answer, end.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    plain: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    base_url: Address = None,
) -> None:
    """Chat in the terminal. An empty line or Ctrl-D ends it; lines may also come from a pipe."""
    import asyncio

    import mint
    from mint.rl.completers import SamplingMessageCompleter
    from mint.rl.renderers import ChatRenderer, PlainRenderer

    with mint.ServiceClient(base_url) as service:
        with waiting(f"loading {what}"):
            client = _open(service, what)
            tokenizer = client.get_tokenizer()
        plain = plain or not getattr(tokenizer, "chat_template", None)
        renderer = PlainRenderer(tokenizer) if plain else ChatRenderer(tokenizer)
        complete = SamplingMessageCompleter(client, renderer, max_tokens, temperature)
        opening = [{"role": "system", "content": system}] if system else []
        messages: list[dict[str, Any]] = list(opening)
        for said in [prompt] if prompt is not None else _lines():
            messages = [*([] if plain else messages), {"role": "user", "content": said.replace("\\n", "\n")}]
            answer = asyncio.run(_answer(complete, messages))
            typer.echo(answer["content"])
            messages.append(answer)


async def _answer(complete: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = await complete(messages)
    return answer


def _open(service: mint.ServiceClient, what: str) -> mint.SamplingClient:
    from mint.rl.recheck import find_checkpoints
    from mint.rl.rundir import RunDir

    if (Path(what) / "config.json").is_file() and (Path(what) / "metrics.jsonl").is_file():
        return service.create_sampling_client(model_path=find_checkpoints(RunDir(what))[-1].sampler_path)
    if "://" in what:
        return service.create_sampling_client(model_path=what)
    return service.create_sampling_client(base_model=what)


def _lines() -> Any:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line
