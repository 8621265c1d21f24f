"""`python -m mint.engine.reload`: what an exported folder computes, by transformers and PEFT alone.

A process of its own, which loads nothing of the engine: it stands for whoever loads the folder later. Reads a question
as JSON from standard input, and answers with one line: log-probs, and the tokens of texts.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder: str, base: str | None) -> Any:
    """An adapter over its base model, or, without a base model, a whole model."""
    settings = {"dtype": torch.float32, "local_files_only": True}
    if base is None:
        return AutoModelForCausalLM.from_pretrained(folder, **settings)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **settings), folder)


@torch.no_grad()
def logprobs(model: Any, tokens: list[int], device: str) -> list[float]:
    logits = model(input_ids=torch.tensor([tokens[:-1]], device=device), use_cache=False).logits[0].float()
    targets = torch.tensor(tokens[1:], device=device)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].tolist()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    device, texts = asked["device"], []
    if asked["texts"]:
        tokenizer = AutoTokenizer.from_pretrained(asked["folder"], local_files_only=True)
        texts = [tokenizer.encode(text) for text in asked["texts"]]
    model = load(asked["folder"], asked["base"]).to(device).eval()
    return {"logprobs": [logprobs(model, tokens, device) for tokens in asked["tokens"]], "texts": texts}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
