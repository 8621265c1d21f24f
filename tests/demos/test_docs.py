"""The guides say what is so: their snippets run, and their tables of defaults are the code's."""

import pkgutil
import re
from dataclasses import fields

import pytest

import mint
from mint import tinker
from mint.rl.train import Config
from tests.rl.conftest import ROOT

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(page: str) -> list[str]:
    return PYTHON.findall((ROOT / "docs" / page).read_text())


def test_the_prompting_guide_runs_from_top_to_bottom(served, capsys) -> None:
    code = snippets("prompting.md")
    assert len(code) >= 8
    names: dict[str, object] = {}
    for number, snippet in enumerate(code):
        exec(compile(snippet, f"prompting.md, snippet {number + 1}", "exec"), names)
    printed = capsys.readouterr().out
    assert "14664" in printed and "of 2 tests passed" in printed


def test_the_migration_tables_show_the_defaults_there_are() -> None:
    from rl_core import RLConfig

    page = (ROOT / "docs" / "migration.md").read_text()
    ours, theirs = mint.types.AdamParams(), tinker.AdamParams()
    for name in ("learning_rate", "beta1", "beta2", "eps"):
        assert f"| `AdamParams.{name}` | {getattr(ours, name):g} | {getattr(theirs, name):g} |" in page
    ranks = [kind.__init__.__defaults__[0] for kind in (mint.types.LoraConfig, tinker.LoraConfig)]
    assert f"| `create_lora_training_client` `rank` | {ranks[0]} | {ranks[1]} |" in page

    demo, default = RLConfig(), {field.name: field.default for field in fields(Config)}
    adam = f"{ours.beta2:g}, {ours.eps:g}"
    rows = [
        f"| LoRA rank | {demo.rank} | {default['lora_rank']} | {ranks[0]} |",
        f"| learning rate | {demo.lr:g} | must be given | {ours.learning_rate:g} |",
        f"| sampling temperature | {demo.temperature} | {default['temperature']} "
        f"| {mint.types.SamplingParams().temperature} |",
        f"| answers per prompt | {demo.group} | the dataset's | 1 |",
        f"| Adam `beta2`, `eps` | {adam} | {default['beta2']:g}, {default['eps']:g} | {adam} |",
        f"| loss | {demo.loss_fn} | {default['loss_fn']} | must be given |",
        f"| KL coefficient | none | {default['kl_penalty_coef']} | none |",
    ]
    for row in rows:
        assert row in page


@pytest.mark.parametrize("page", ["prompting.md", "migration.md"])
def test_everything_a_guide_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for dotted in set(re.findall(r"`(mint(?:\.\w+)+)", text)):
        pkgutil.resolve_name(dotted)
    for target in re.findall(r"\]\((\w+\.md)\)", text):
        assert (ROOT / "docs" / target).is_file()
