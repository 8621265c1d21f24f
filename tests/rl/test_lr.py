"""A suggested learning rate for any architecture."""

import json

import pytest

from mint.errors import BadRequest
from mint.rl.lr import get_lr, read_hidden_size


def test_fitted_families_get_the_published_rates():
    assert get_lr("meta-llama/Llama-3.1-8B", hidden_size=4096) == pytest.approx(5e-4 * (2000 / 4096) ** 0.781)
    assert get_lr("Qwen/Qwen3-8B", hidden_size=4096) == pytest.approx(5e-4 * (2000 / 4096) ** 0.0775)


def test_full_fine_tuning_gets_a_tenth():
    assert get_lr("Qwen/Qwen3-8B", is_lora=False, hidden_size=4096) == pytest.approx(
        get_lr("Qwen/Qwen3-8B", hidden_size=4096) / 10
    )


@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192])
def test_an_unfitted_family_lies_between_the_fitted_ones_and_never_far_from_either(width):
    llama, qwen, other = (get_lr(name, hidden_size=width) for name in ("llama", "qwen", "google/gemma-3-1b-it"))
    assert min(llama, qwen) <= other <= max(llama, qwen)
    assert max(other / llama, llama / other, other / qwen, qwen / other) < 1.7


def test_the_bundled_model_has_a_rate():
    assert read_hidden_size("mint/tiny") > 0
    assert 1e-5 < get_lr("mint/tiny") < 1e-2


@pytest.mark.parametrize(
    "config", [{"hidden_size": 96}, {"text_config": {"hidden_size": 96}}, {"d_model": 96}, {"n_embd": 96}]
)
def test_the_hidden_size_is_found_under_any_of_its_names(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hidden_size(str(tmp_path)) == 96


def test_a_config_without_a_width_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadRequest, match="pass hidden_size="):
        get_lr(str(tmp_path))


def test_an_unknown_model_says_what_to_do():
    with pytest.raises(BadRequest, match="pass hidden_size="):
        get_lr("no such/model name")
