"""The base models: loaded when first asked for, their facts and tokenizers kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mint.backend import Backend, ModelFacts
from mint.doorbell import arriving
from mint.errors import BadRequest

if TYPE_CHECKING:
    from mint.chat import FolderTokenizer


def sizes(facts: ModelFacts | None) -> tuple[int | None, int | None]:
    """Vocabulary and context, where they are known already."""
    return (facts.vocab_size, facts.max_context) if facts else (None, None)


class Catalogue:
    def __init__(self, backend: Backend, models: Sequence[str]) -> None:
        self._backend = backend
        self._served = tuple(models)
        self._loads: dict[str, asyncio.Task[ModelFacts]] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._tokenizers: dict[str, FolderTokenizer] = {}

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._served, *self._backend.models(), *self._facts]))

    def known(self, name: str) -> ModelFacts | None:
        """The facts, if the model has been loaded."""
        return self._facts.get(name)

    def check(self, name: str) -> None:
        """Refuses a model this server will never load; with an open catalogue only loading can tell."""
        if self._served and name not in self._served:
            raise BadRequest(f"base model {name!r} is not served here; served: {', '.join(self._served)}.")

    async def load(self, name: str) -> ModelFacts:
        self.check(name)
        if name not in self._loads:
            self._loads[name] = asyncio.get_running_loop().create_task(self._load(name))
            self._loads[name].add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who asks
        return await asyncio.shield(self._loads[name])

    async def _load(self, name: str) -> ModelFacts:
        try:
            self._facts[name] = await arriving(self._backend.load_model(name))
        except BaseException:
            del self._loads[name]  # a download may succeed the next time
            raise
        return self._facts[name]

    async def tokenizer(self, name: str) -> FolderTokenizer:
        facts = await self.load(name)
        if name not in self._tokenizers:
            from mint.chat import FolderTokenizer

            self._tokenizers[name] = await asyncio.to_thread(FolderTokenizer, facts.folder)
        return self._tokenizers[name]
