import dataclasses

import pytest

from mint.errors import BadRequest
from mint.rl.advantages import get_estimator
from mint.rl.aggregation import AGGREGATIONS
from mint.rl.algorithms import ALGORITHMS, get_algorithm
from mint.rl.config import Config
from tests.rl.test_datasets import Source


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_a_configuration(name: str) -> None:
    config = Config(
        **{"learning_rate": 1e-5} | get_algorithm(name, max_tokens=100),
        dataset_builder=Source("a", 5),
        model_name="mint/tiny",
        recipe_name="test",
        log_path="unused",
    )
    assert config.max_tokens == 100
    get_estimator(config.advantage)
    assert config.aggregation in AGGREGATIONS


def test_the_default_algorithm_is_the_default_configuration() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    named = get_algorithm("mint", max_tokens=100)
    assert {key: defaults[key] for key in named if key != "max_tokens"} == {
        key: value for key, value in named.items() if key != "max_tokens"
    }


def test_dapo_is_all_five_of_its_parts() -> None:
    dapo = get_algorithm("dapo", max_tokens=100)
    assert dapo["loss_fn_config"] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    assert dapo["aggregation"] == "token_mean"
    assert dapo["dynamic_sampling"] > 0
    assert dapo["mask_truncated"] is True
    assert dapo["overlong_buffer"] == 20


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="grpo, dr_grpo, dapo, gspo, rloo, cispo"):
        get_algorithm("ppo2", max_tokens=10)
