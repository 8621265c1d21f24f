"""A folder in which the cookbook's recipes run unmodified and offline: two models and two datasets, by relative names.

`transformers` and `datasets` take a name like `Qwen/Qwen3-8B` for a folder if there is one below the working
directory, and so does `mint serve`. What lies there is made here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "mint" / "models" / "tiny"

BOXED, ADDS = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"
"""Names the cookbook has renderers for: a random model that boxes a three now and then, and mint/tiny."""
MODELS = (BOXED, ADDS)


def fill(folder: Path) -> None:
    shutil.copytree(TINY, folder / ADDS)
    _random_model(folder / BOXED)
    questions = [{"question": f"What is {n} + {3 - n}?", "answer": f"It is three.\n#### {3}"} for n in range(4)] * 4
    chats = [[("user", f"Count to {n}."), ("assistant", " ".join(map(str, range(1, n + 1))))] for n in range(1, 17)]
    messages = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    _dataset(folder / "openai" / "gsm8k", "main", questions)
    _dataset(folder / "HuggingFaceH4" / "no_robots", "default", messages)


def _random_model(folder: Path) -> None:
    """Its vocabulary has the right answer as one token, so that even random samples earn a reward now and then."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, set_seed

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(["<think>", "</think>", "\\boxed{3}"])
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dataset(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{splits}---\n")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
