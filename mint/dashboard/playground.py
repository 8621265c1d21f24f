"""Two policies side by side: chat with both, or have both complete a text, and see how sure they were."""

from __future__ import annotations

import asyncio
import html
import math
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from nicegui import events, ui

from mint.dashboard.frame import banner, markup, page
from mint.dashboard.serving import Serving
from mint.dashboard.site import Viewer
from mint.dashboard.theme import number
from mint.errors import MintError

DRAWN_EVERY = 0.08
"""Seconds between redraws of a reply that is being streamed."""


@dataclass
class Side:
    """One policy and its conversation."""

    model: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    tokens: list[tuple[str, float]] = field(default_factory=list)
    text: str = ""
    fault: str = ""
    busy: bool = False


def checkpoints_of(viewer: Viewer) -> dict[str, str]:
    """Checkpoints that runs say can be sampled from, the newest run first: path -> words."""
    found: dict[str, str] = {}
    for run in viewer.library.runs():
        for line in reversed(run.checkpoints):
            path = line.get("sampler_path")
            if isinstance(path, str):
                last = " (last)" if line.get("final") else ""
                found.setdefault(path, f"{run.name}, step {line.get('batch')}{last}")
    return found


async def choices(viewer: Viewer) -> dict[str, str]:
    """What the server can sample from: base models, then checkpoints, by the run's name where a run tells it."""
    await viewer.serving.start()
    listed = (await viewer.serving.get("v1/models"))["data"]
    names = checkpoints_of(viewer)
    known = {entry["id"]: names.get(entry["id"], entry["id"]) for entry in listed}
    base = {name: f"{name} (base)" for name in known if "://" not in name}
    base = base or {"mint/tiny": "mint/tiny (base)"}
    saved = [name for name in known if "://" in name]
    mine = [name for name in names if name in known]
    order = mine + [name for name in saved if name not in names]
    return base | {name: known[name] for name in order}


def body_of(
    side: Side, chat: bool, prompt: str, temperature: float, max_tokens: int, seed: int | None
) -> dict[str, Any]:
    common: dict[str, Any] = {"model": side.model, "temperature": temperature, "max_tokens": max_tokens}
    if seed is not None:
        common["seed"] = seed
    if chat:
        return common | {"messages": side.turns, "logprobs": True}
    return common | {"prompt": prompt, "logprobs": 1}


def colored(tokens: list[tuple[str, float]]) -> str:
    """Tokens tinted by how surprising each was; hovering tells its probability."""
    cells = []
    for text, logprob in tokens:
        strength = min(-logprob / 5, 1.0) if math.isfinite(logprob) else 1.0
        tint = f"background: rgba(139,92,246,{0.08 + 0.6 * strength**0.8:.3f})" if strength > 0.004 else ""
        tip = f"log-prob {number(logprob)}, probability {number(math.exp(logprob))}"
        cells.append(f'<span class="t" style="{tint}" title="{tip}">{html.escape(text)}</span>')
    return "".join(cells)


class Playground:
    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.serving: Serving = viewer.serving
        self.sides = [Side(), Side()]
        self.chat = True

    def build(self) -> None:
        self.state = ui.element("div")
        with self.state:
            local = self.serving.address is None
            words = "Starting a server on this machine; this takes some seconds…" if local else "Asking the server…"
            ui.label(words).classes("muted")
        self.box = ui.element("div").style("display: flex; flex-direction: column; gap: 12px")
        ui.timer(0, self._open, once=True)

    async def _open(self) -> None:
        try:
            models = await choices(self.viewer)
        except MintError as error:
            self.state.clear()
            with self.state:
                banner("alarm", str(error))
                with ui.element("button").classes("plain").style("margin-top: 10px").on("click", ui.navigate.reload):
                    ui.label("Try again")
            return
        self.state.clear()
        names = list(models)
        self.sides[0].model, self.sides[1].model = names[0], names[1] if len(names) > 1 else names[0]
        with self.box:
            self._settings()
            with ui.element("div").classes("pair"):
                self.drawn = [self._side(side, models) for side in self.sides]
            self._prompt()
            if len(names) == 1:
                banner(
                    "notice",
                    "There is no checkpoint yet, so both sides are the base model. Runs save theirs every save_every "
                    "steps.",
                )

    # ------------------------------------------------------------------------------------------------ parts

    def _settings(self) -> None:
        with ui.element("div").classes("card flow").style("padding: 8px 16px; gap: 18px"):
            kinds = ui.toggle({True: "Chat", False: "Complete"}, value=True, on_change=self._set_chat)
            kinds.props("dense no-caps unelevated padding='4px 14px'")
            ui.label("Temperature").classes("muted")
            self.temperature = ui.slider(min=0, max=2, step=0.05, value=0.7).style("width: 150px")
            ui.label().bind_text_from(self.temperature, "value", lambda value: f"{value:.2f}").style("width: 34px")
            self.max_tokens = ui.number("Most tokens", value=64, min=1, max=4096, format="%d")
            self.seed = ui.number("Seed", value=None, min=0, format="%d", placeholder="random")
            for box in (self.max_tokens, self.seed):
                box.props("dense outlined").style("width: 110px")
            with self.seed:
                ui.tooltip("With a seed the same question gets the same answer again.")
            ui.element("div").classes("grow")
            markup(
                '<span class="scale"><span>certain</span><span class="ramp" style="background:linear-gradient(90deg,'
                'transparent,rgba(139,92,246,.68))"></span><span>surprising</span></span>'
            )

    def _side(self, side: Side, models: dict[str, str]) -> tuple[ui.html, ui.html]:
        with ui.element("div").classes("card side"):
            picked = ui.select(models, value=side.model, with_input=True).props("dense borderless options-dense")
            picked.style("padding: 4px 16px; border-bottom: 1px solid var(--line); width: 100%")
            picked.on_value_change(lambda event: setattr(side, "model", event.value))
            talk = markup('<span class="faint">Ask something below; both answer.</span>').classes("talk")
            meta = markup("").classes("meta")
        return talk, meta

    def _prompt(self) -> None:
        with ui.element("div").classes("card flow").style("padding: 8px 10px; flex-wrap: nowrap"):
            self.asked = ui.textarea(placeholder="What is 47 + 38?").classes("grow")
            self.asked.props("dense borderless autogrow rows=1")
            self.asked.on("keydown.enter.exact.prevent", self._ask)
            with ui.element("button").classes("plain").on("click", self._clear):
                ui.label("Clear")
            with ui.element("button").classes("plain primary").on("click", self._ask):
                ui.label("Ask both")
                ui.tooltip("Enter; Shift and Enter for a new line")

    # ------------------------------------------------------------------------------------------------ what happens

    def _set_chat(self, event: events.ValueChangeEventArguments) -> None:
        self.chat = bool(event.value)
        self.asked.props(f'placeholder="{"What is 47 + 38?" if self.chat else "Q: What is 47 + 38?  A:"}"')
        self._clear()

    def _clear(self) -> None:
        for side, (talk, meta) in zip(self.sides, self.drawn, strict=True):
            side.turns, side.tokens, side.text, side.fault = [], [], "", ""
            talk.set_content("")
            meta.set_content("")

    async def _ask(self) -> None:
        prompt = self.asked.value or ""
        if not prompt.strip() or any(side.busy for side in self.sides):
            return
        if self.chat:
            self.asked.value = ""
        await asyncio.gather(*(self._answer(number, prompt) for number in range(2)))

    async def _answer(self, which: int, prompt: str) -> None:
        side = self.sides[which]
        side.busy, side.tokens, side.text, side.fault = True, [], "", ""
        if self.chat:
            side.turns.append({"role": "user", "content": prompt})
        seed = None if self.seed.value is None else int(self.seed.value)
        body = body_of(side, self.chat, prompt, float(self.temperature.value), int(self.max_tokens.value or 64), seed)
        route = "v1/chat/completions" if self.chat else "v1/completions"
        self._draw(which, prompt)
        drawn = 0.0
        now = asyncio.get_running_loop().time
        try:
            async for piece in self.serving.stream(route, body):
                side.text += piece.text
                side.tokens += piece.tokens
                if now() - drawn > DRAWN_EVERY:
                    drawn = now()
                    self._draw(which, prompt)
        except MintError as error:
            side.fault = str(error)
        finally:
            side.busy = False
        if self.chat and not side.fault:
            side.turns.append({"role": "assistant", "content": side.text})
        self._draw(which, prompt)

    def _draw(self, which: int, prompt: str) -> None:
        side, (talk, meta) = self.sides[which], self.drawn[which]
        before = [turn for turn in side.turns if self.chat]
        if before and before[-1]["role"] == "assistant":
            before = before[:-1]
        parts = [
            f'<div class="{"said" if turn["role"] == "user" else "reply"}">{html.escape(turn["content"])}</div>'
            for turn in before
        ]
        reply = colored(side.tokens) if side.tokens else html.escape(side.text)
        shown = reply if self.chat else f'<span class="faint">{html.escape(prompt)}</span>{reply}'
        parts.append(f'<div class="reply">{shown}{"▍" if side.busy else ""}</div>')
        if side.fault:
            parts.append(f'<div class="banner alarm">{html.escape(side.fault)}</div>')
        talk.set_content("".join(parts))
        total = sum(logprob for _, logprob in side.tokens)
        mean = number(total / len(side.tokens)) if side.tokens else ""
        waiting = "waiting for the first token; a model is loaded when it is first used" if side.busy else ""
        meta.set_content(f"{len(side.tokens)} tokens · log-prob {number(total)}, {mean} a token" if mean else waiting)


@ui.page("/playground")
def playground_page(request: Request) -> None:
    with page(request, "Playground", "Playground") as viewer:
        markup('<div class="crumbs"><h1>Playground</h1></div>')
        Playground(viewer).build()
