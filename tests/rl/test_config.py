"""Config: the cookbook's names and defaults, and a refusal in words for whatever cannot be meant."""

import dataclasses
import json

import pytest

from mint.errors import BadRequest
from mint.rl.algorithms import ALGORITHMS, get_algorithm
from mint.rl.config import describe
from mint.rl.schedules import Schedule
from mint.rl.train import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig
from tests.rl.fake_service import HalfDataset

REQUIRED = {
    "learning_rate": 1e-5,
    "dataset_builder": HalfDataset(),
    "model_name": "mint/tiny",
    "recipe_name": "test",
    "max_tokens": 16,
    "log_path": "somewhere",
}


def config(**fields) -> Config:
    return Config(**(REQUIRED | fields))


def test_defaults_are_the_cookbooks():
    published = {
        "eval_every": 20,
        "save_every": 20,
        "load_checkpoint_path": None,
        "renderer_name": None,
        "wandb_project": None,
        "wandb_name": None,
        "kl_penalty_coef": 0.0,
        "kl_discount_factor": 0.0,
        "kl_reference_config": None,
        "loss_fn": "importance_sampling",
        "loss_fn_config": None,
        "num_substeps": 1,
        "lora_rank": 32,
        "temperature": 1.0,
        "compute_post_kl": False,
        "remove_constant_reward_groups": False,
        "rollout_error_tolerance": None,
        "termination": None,
        "enable_trace": False,
        "span_chart_every": 0,
        "async_config": None,
        "stream_minibatch_config": None,
        "base_url": None,
        "ttl_seconds": 604800,
        "rolling_save_every": 0,
        "rolling_ttl_seconds": 7200,
        "num_groups_to_log": 4,
        "rollout_json_export": True,
        "max_steps": None,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
    }
    made = config()
    assert {name: getattr(made, name) for name in published} == published
    assert list(made.evaluator_builders) == []


@pytest.mark.parametrize("name", REQUIRED)
def test_required_fields_are_required(name):
    with pytest.raises(TypeError, match=name):
        Config(**{key: value for key, value in REQUIRED.items() if key != name})


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="learnig_rate"):
        config(learnig_rate=1.0)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().max_tokens = 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_fn": "grpo"}, "unknown loss_fn 'grpo'; known: "),
        ({"loss_fn_config": {"clip": 1}}, "unknown key 'clip'"),
        ({"advantage": "mean"}, "no advantage estimator"),
        ({"aggregation": "mean"}, "aggregation is 'mean'; there are token_sum"),
        ({"kl_mode": "both"}, "no KL mode is called 'both'; there are advantage, loss"),
        ({"kl_mode": "loss", "kl_estimator": "k1"}, "takes k2 or k3"),
        ({"kl_estimator": "k3"}, "kl_mode 'advantage' takes k1"),
        ({"kl_mode": "loss", "kl_discount_factor": 0.9}, "no discount"),
        ({"learning_rate": "quick"}, "is not a schedule"),
        ({"temperature": "hot"}, "is not a schedule"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"num_substeps": 0}, "num_substeps is 0"),
        ({"max_lag": -1}, "max_lag is -1"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"holdout": 1.0}, "holdout is 1.0; it must be below 1"),
        ({"overlong_buffer": 17}, "more than max_tokens"),
        ({"loggers": ("paper",)}, "'paper'; there are console"),
        ({"loss_fn": "dro", "aggregation": "token_mean"}, "not linear in the advantage"),
        ({"max_lag": 1, "async_config": AsyncConfig(2, 4)}, "max_lag is 1 but async_config says 2"),
        (
            {"async_config": AsyncConfig(2, 4), "stream_minibatch_config": StreamMinibatchConfig(8, 2)},
            "they must agree",
        ),
        ({"stream_minibatch_config": StreamMinibatchConfig(4, 2), "aggregation": "token_mean"}, "whole optimizer step"),
        ({"stream_minibatch_config": StreamMinibatchConfig(4, 2), "dynamic_sampling": 1}, "cannot stream"),
        ({"stream_minibatch_config": StreamMinibatchConfig(4, 2), "num_substeps": 3}, "at least one group"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(fields, words):
    with pytest.raises(BadRequest, match=words):
        config(**fields)


def test_the_cookbooks_ways_to_say_it_map_onto_the_one_loop():
    assert config(async_config=AsyncConfig(max_steps_off_policy=3, groups_per_batch=8)).lag == 3
    assert config(async_config=AsyncConfig(max_steps_off_policy=3, groups_per_batch=8)).groups_per_batch == 8
    assert config(stream_minibatch_config=StreamMinibatchConfig(8, 2)).groups_per_batch == 8
    assert config(max_lag=2).lag == 2 and config().groups_per_batch is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_named_algorithm_is_a_valid_config(name):
    chosen = get_algorithm(name, max_tokens=64)
    made = Config(**(REQUIRED | chosen))
    assert made.max_tokens == 64 and made.advantage == chosen["advantage"]


def test_a_wandb_project_turns_its_logger_on():
    assert config(wandb_project="p").logger_names == ("console", "wandb")


def test_config_as_json_is_complete_and_the_same_in_every_process():
    given = config(
        learning_rate=Schedule(1e-5, 0.0, "cosine"),
        kl_reference_config=KLReferenceConfig("mint/tiny"),
        evaluator_builders=[test_unknown_fields_are_refused],
    )
    saved = json.loads(json.dumps(given.to_json()))
    assert set(saved) == {field.name for field in dataclasses.fields(Config)}
    assert saved["learning_rate"] == {"type": "Schedule", "start": 1e-5, "end": 0.0, "shape": "cosine", "warmup": 0}
    assert saved["dataset_builder"]["num_batches"] == 6
    assert " at 0x" not in json.dumps(saved)


def test_long_data_in_a_config_is_written_as_a_digest_that_tells_it_apart():
    assert describe(list(range(1000))) == describe(list(range(1000)))
    assert describe(list(range(1000))) != describe([*range(999), 0])
    assert len(json.dumps(describe(list(range(100_000))))) < 200
