"""The table of verbs: where each lives, under which heading help shows it, and in what words.

`mint --help` reads this table and imports no verb; a verb's file is imported when that verb is asked for. A target is a
function or, for a verb with verbs of its own, a `typer.Typer`.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN, LOOK, SERVE, MACHINE = "Train", "Look at a run", "Serve and use models", "This machine"


@dataclass(frozen=True)
class Verb:
    target: str
    """`module:name`, below `mint.cli`."""
    panel: str
    summary: str
    takes_fields: bool = False
    """Options the verb does not declare are handed to it, in `ctx.args`."""


VERBS: dict[str, Verb] = {
    "quickstart": Verb("quickstart:quickstart", TRAIN, "Watch a model learn to add, here and now, in a minute or two."),
    "train": Verb("train:train", TRAIN, "Train by a recipe, a TOML file or a Python file.", takes_fields=True),
    "sweep": Verb("sweep:sweep", TRAIN, "Train with several settings and seeds, and compare.", takes_fields=True),
    "eval": Verb("evaluate:evaluate", TRAIN, "Measure a run's checkpoints on its holdout."),
    "bisect": Verb("bisect:bisect", TRAIN, "Find the first bad checkpoint of a run."),
    "dashboard": Verb("dashboard:dashboard", LOOK, "Look at runs in a browser, live or finished, down to the token."),
    "runs": Verb("runs:runs", LOOK, "List the runs in a folder: state, progress, reward, alarms."),
    "show": Verb("show:show", LOOK, "One run: its last figures, settings and samples, down to the token."),
    "watch": Verb("watch:watch", LOOK, "Follow a run as it goes."),
    "plot": Verb("plot:plot", LOOK, "Draw the curves of one or several runs as a picture."),
    "report": Verb("report:report", LOOK, "Write one HTML file about a run, to send to a colleague."),
    "doctor": Verb("doctor:doctor", LOOK, "Say why a run does not learn, likeliest cause first."),
    "advise": Verb("advise:advise", LOOK, "Advise a group size from the pass rates a run has measured."),
    "serve": Verb("serve:serve", SERVE, "Serve models over HTTP."),
    "keys": Verb("keys:keys", SERVE, "Make, list, change and revoke API keys."),
    "usage": Verb("usage:usage", SERVE, "Tokens, requests, engine time and disk by key and run."),
    "top": Verb("top:top", SERVE, "A server's queue, tokens a second, adapters, memory and tenants, live."),
    "models": Verb("models:models", SERVE, "List the models a server has, or this machine."),
    "chat": Verb("chat:chat", SERVE, "Talk to a base model, a checkpoint or a run's latest."),
    "checkpoints": Verb("checkpoints:app", SERVE, "List, download and delete checkpoints."),
    "export": Verb("export:export", SERVE, "Write a checkpoint for other programs, and prove it the same."),
    "bench": Verb("bench:bench", MACHINE, "Measure sampling and training here, or on a server."),
    "info": Verb("info:info", MACHINE, "Versions, devices, and what is missing and how to get it."),
}
