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
    "eval": Verb("evaluate:evaluate", TRAIN, "Measure a run's checkpoints on its holdout."),
    "bisect": Verb("bisect:bisect", TRAIN, "Find the first bad checkpoint of a run."),
    "plot": Verb("plot:plot", LOOK, "Draw the curves of one or several runs as a picture."),
    "doctor": Verb("doctor:doctor", LOOK, "Say why a run does not learn, likeliest cause first."),
    "advise": Verb("advise:advise", LOOK, "Advise a group size from the pass rates a run has measured."),
    "serve": Verb("serve:serve", SERVE, "Serve models over HTTP."),
}
