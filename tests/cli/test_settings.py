"""Options and TOML tables become the fields they name, with the type the field has."""

import asyncio
from dataclasses import fields, replace

import pytest

from mint.cli.failures import Failure
from mint.cli.fields import documented_fields
from mint.cli.settings import apply, from_words
from mint.cli.sources import resolve
from mint.recipes import RECIPES, get_recipe
from mint.recipes.presets import PRESETS, get_preset
from mint.rl.config import Config, KLReferenceConfig
from tests.rl.conftest import ROOT

BASE = get_recipe("addition")


def with_words(*words: str) -> Config:
    return apply(BASE, from_words(words, BASE))


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--learning-rate", "2e-4"], {"learning_rate": 2e-4}),
        (["--learning_rate=2e-4"], {"learning_rate": 2e-4}),
        (["--learning-rate", "cosine 2e-4 -> 0, warmup 3"], {"learning_rate": "cosine 2e-4 -> 0, warmup 3"}),
        (["--max-steps", "7", "--mask-truncated"], {"max_steps": 7, "mask_truncated": True}),
        (["--no-rollout-json-export"], {"rollout_json_export": False}),
        (["--rollout-json-export", "false"], {"rollout_json_export": False}),
        (["--recipe-name", "5"], {"recipe_name": "5"}),
        (["--max-steps", "none"], {"max_steps": None}),
        (["--difficulty-band", "(0.2, 0.8)"], {"difficulty_band": (0.2, 0.8)}),
        (["--loggers", "[]"], {"loggers": ()}),
        (["--kl-reference-config.base-model", "m"], {"kl_reference_config": KLReferenceConfig("m")}),
        (["--loss-fn", "ppo", "--loss-fn-config.clip-low-threshold", "0.7"],
         {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.7}}),
        (["--group-size", "4"], {"dataset_builder": replace(BASE.dataset_builder, group_size=4)}),
        (["--batch-size", "3"], {"dataset_builder": replace(BASE.dataset_builder, groups_per_batch=3)}),
        (["--batch-size", "3", "--groups-per-batch=3", "--limit", "5"],
         {"dataset_builder": replace(BASE.dataset_builder, groups_per_batch=3, limit=5)}),
        (["--dataset-builder.seed", "3"], {"dataset_builder": replace(BASE.dataset_builder, seed=3)}),
        (["--model-name", "other"],
         {"model_name": "other", "dataset_builder": replace(BASE.dataset_builder, model_name="other")}),
    ],
)  # fmt: skip
def test_words_become_fields(words: list[str], changed: dict[str, object]) -> None:
    assert with_words(*words) == replace(BASE, **changed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-tokens", "many"], "max_tokens is 'many'; it takes a whole number"),
        (["--max-tokens", "1.5"], "a whole number"),
        (["--mask-truncated", "3"], "true or false"),
        (["--group-sice", "3"], "did you mean --group-size"),
        (["--dataset-builder.grup-size", "3"], "did you mean --group-size"),
        (["--kl-reference-config.model", "m"], "kl_reference_config"),
        (["4"], "is not a setting"),
        (["--batch-size", "3", "--groups-per-batch", "4"], "groups_per_batch is given as 3 and as 4"),
        (["--seed", "3", "--seed", "4"], "seed is given as 3 and as 4"),
    ],
)
def test_a_wrong_word_is_refused_with_what_was_meant(words: list[str], said: str) -> None:
    with pytest.raises(Failure, match=said):
        with_words(*words)


def test_a_file_is_a_recipe_then_presets_then_its_fields_then_options(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "math"\npreset = "grpo"\nlora_rank = 8\nseed = 1\n[dataset_builder]\ngroup_size = 2\n')
    found = resolve(str(file), ["starting_point"], ["--seed", "2"])
    assert found.config == replace(
        get_recipe("math"), **get_preset("grpo", 8), learning_rate=1e-5, kl_penalty_coef=0.05, lora_rank=8, seed=2,
        dataset_builder=replace(get_recipe("math").dataset_builder, group_size=2),
    )  # fmt: skip
    assert found.decided["seed"] == "option" and found.decided["lora_rank"] == str(file)
    assert found.decided["advantage"] == "preset grpo" and found.decided["learning_rate"] == "preset starting_point"
    assert found.decided["eval_every"] == "math" and found.decided["dataset_builder.group_size"] == str(file)


def test_a_python_file_beside_a_toml_file_is_found(tmp_path) -> None:
    (tmp_path / "task.py").write_text("from mint.recipes.addition import CONFIG\n")
    (tmp_path / "mine.toml").write_text('recipe = "task.py"\nmax_steps = 3\n')
    assert resolve(str(tmp_path / "mine.toml"), [], []).config == replace(BASE, max_steps=3)
    assert resolve(f"{tmp_path / 'task.py'}:CONFIG", [], []).config == BASE
    assert resolve("mint.recipes.addition:CONFIG", [], []).config == BASE


@pytest.mark.parametrize("text", ["recipe = addition", "recipe = 3"])
def test_a_broken_file_is_told(text: str, tmp_path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(Failure, match=r"bad\.toml"):
        resolve(str(tmp_path / "bad.toml"), [], [])


def test_every_field_has_its_line_in_the_list() -> None:
    listed = documented_fields(Config)
    assert [one.name for one in listed] == [f.name for f in fields(Config)]
    assert dict((one.name, one.meaning) for one in listed)["seed"].startswith("Of the initial adapter")


def test_the_starting_point_of_the_guide_is_a_preset() -> None:
    config = apply(BASE, get_preset("starting_point", BASE.max_tokens))
    assert (config.learning_rate, config.kl_penalty_coef, config.dataset_builder.group_size) == (1e-5, 0.05, 4)
    assert len(PRESETS) == len(set(PRESETS))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_started_on_a_few_problems_asked_again_and_again(recipe: str) -> None:
    builder = replace(get_recipe(recipe).dataset_builder, limit=3, groups_per_batch=2, num_batches=3, tests=2)
    training, tests = asyncio.run(builder())
    asked = [group.problem_id() for batch in range(len(training)) for group in training.get_batch(batch)]
    assert asked[:3] == asked[3:] and len(training) == 3 and len(tests) == 1
    unlimited, _ = asyncio.run(replace(builder, limit=None)())
    assert [group.problem_id() for group in unlimited.get_batch(0)] == asked[:2]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_goes_with_every_recipe(recipe: str, preset: str) -> None:
    base = get_recipe(recipe)
    assert apply(base, get_preset(preset, base.max_tokens)).max_tokens == base.max_tokens


def test_the_package_holds_every_recipe() -> None:
    for recipe in RECIPES.values():
        assert (ROOT / "mint" / "recipes" / f"{recipe.module}.py").is_file()
