"""The bundled model in other people's hands."""

import json
from pathlib import Path

TINY = Path(__file__).parents[2] / "mint" / "models" / "tiny"


def test_the_bundled_tokenizer_names_a_class_that_transformers_4_knows_too() -> None:
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
