"""`quickstart.py`: its functions by hand-computed cases, and the whole script in a few steps."""

import json
import os
import random
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest

from mint import types
from mint.client.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("mint/tiny")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 85", 85),
        ("85<|im_end|>", 85),
        (" 85 apples, not 86.", 85),
        ("-17", -17),
        ("The answer is 1,234.", 1234),
        ("\\boxed{1,234,567}", 1234567),
        ("0", 0),
        ("007", 7),
        ("no idea", None),
        ("-", None),
        ("", None),
    ],
)
def test_extract_answer_reads_the_first_number(text: str, answer: int | None) -> None:
    from quickstart import extract_answer, reward_of

    assert extract_answer(text) == answer
    if answer is not None:
        assert reward_of(text, (answer, 0)) == 1.0
        assert reward_of(text, (answer, 1)) == 0.0


def test_rl_datums_are_those_the_documents_build_by_hand() -> None:
    from quickstart import rl_datums

    prompt = TOKENIZER.encode("Q: What is 3 + 5?\nA:")
    sequences = [
        types.SampledSequence(tokens=[32, 56, 258], logprobs=[-0.1, -0.2, -0.3], stop_reason="stop"),
        types.SampledSequence(tokens=[32, 57], logprobs=[-1.0, -2.0], stop_reason="length"),
    ]
    by_hand = []
    for sequence, advantage in zip(sequences, [0.5, -0.5], strict=True):
        full, prefix, length = prompt + sequence.tokens, len(prompt) - 1, len(sequence.tokens)
        by_hand.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens=full[:-1]),
                loss_fn_inputs={
                    "target_tokens": full[1:],
                    "weights": [0.0] * prefix + [1.0] * length,
                    "logprobs": [0.0] * prefix + sequence.logprobs,
                    "advantages": [0.0] * prefix + [advantage] * length,
                },
            )
        )
    assert rl_datums(prompt, sequences, [1.0, 0.0]) == by_hand
    assert rl_datums(prompt, sequences, [1.0, 1.0]) == []


def test_the_sft_datum_trains_on_the_answer_and_its_end_alone() -> None:
    from quickstart import sft_datum

    datum = sft_datum((3, 5), TOKENIZER, shots=0)
    assert TOKENIZER.decode(datum.model_input.to_ints()) == "Q: What is 3 + 5?\nA: 8"
    targets, weights = (datum.loss_fn_inputs[key].tolist() for key in ("target_tokens", "weights"))
    assert TOKENIZER.decode([t for t, w in zip(targets, weights, strict=True) if w]) == " 8<|im_end|>"
    assert set(weights) == {0.0, 1.0} and len(weights) == datum.model_input.length


def test_training_never_draws_what_is_held_out() -> None:
    from quickstart import draw_problems

    trained, held = (set(draw_problems(random.Random(0), 500, 99, held_out=h)) for h in (False, True))
    assert not {tuple(sorted(p)) for p in trained} & {tuple(sorted(p)) for p in held}


def test_every_setting_has_a_variable_and_the_longer_name_wins(monkeypatch) -> None:
    from quickstart import Settings

    for field in fields(Settings):
        value = "other/model" if field.name == "base_model" else type(field.default)(field.default * 2 + 1)
        with monkeypatch.context() as patch:
            patch.setenv(f"MINT_{field.name.upper()}", str(value))
            changed = Settings.from_env()
        assert getattr(changed, field.name) == value
        assert changed != Settings()
    for name in ("max_tokens", "temperature"):
        with monkeypatch.context() as patch:
            patch.setenv(f"MINT_{name.upper()}", "3")
            patch.setenv(f"MINT_RL_{name.upper()}", "5")
            assert getattr(Settings.from_env(), name) == 5


def test_the_plot_is_as_high_as_the_curve() -> None:
    from quickstart import plot

    rows = plot([0.0, 0.5, 1.0], height=4).splitlines()
    assert rows == [" 100% │    ██", "  75% │    ██", "  50% │  ████", "  25% │  ████", "      └──────"]
    assert "▄" in plot([0.125], height=4)


def test_the_script_takes_its_settings_trains_and_leaves_its_measurements(served, capsys, tmp_path: Path) -> None:
    import quickstart

    settings = {
        "SFT_STEPS": 2, "SFT_BATCH": 4, "SFT_LR": 1e-3, "RL_STEPS": 3, "RL_BATCH": 2, "RL_GROUP": 4, "RL_LR": 1e-3,
        "LORA_RANK": 4, "RL_MAX_TOKENS": 5, "HOLDOUT": 12,
    }  # fmt: skip
    (tmp_path / ".env").write_text("".join(f"MINT_{name}={value}\n" for name, value in settings.items()))
    with mock.patch.dict(os.environ):
        quickstart.main()
    printed = capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert (config["sft_steps"], config["rl_group"], config["lora_rank"], config["max_tokens"]) == (2, 4, 4, 5)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["base", "sft", "sft", "sft", "rl", "rl", "rl"]
    assert lines[2]["loss"] < lines[1]["loss"]
    assert all(line["datums"] % 4 == 0 and line["datums"] <= 8 for line in lines[4:])
    assert "'rl_group': 4" in printed.replace("\n", "") and printed.count("holdout=") == 3
    assert "by GRPO" in printed and "tinker://" in printed
