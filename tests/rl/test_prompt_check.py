"""Prompts that were not made for the model."""

from mint.client.tokenizers import load_tokenizer
from mint.rl.prompt_check import oddity
from mint.rl.rollout_log import TextOf

TOKENIZER = load_tokenizer("mint/tiny")


def odd(text: str) -> str | None:
    return TextOf(TOKENIZER).oddity(TOKENIZER.encode(text))


def test_plain_prompts_and_the_models_own_template_are_as_they_should_be() -> None:
    assert odd("Q: What is 47 + 38?\nA:") is None
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a < b | c > d [1] <b>x</b>"}]
    assert odd(TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) is None
    assert TextOf(TOKENIZER).oddity([]) is None


def test_another_models_markers_are_named() -> None:
    assert "[INST]" in str(odd("[INST] What is 1 + 2? [/INST]"))
    assert "<start_of_turn>" in str(odd("<start_of_turn>user\nHello<end_of_turn>\n"))
    assert "<|start_header_id|>" in str(odd("<|start_header_id|>user<|end_header_id|>\nHello"))


def test_tokens_that_are_not_those_of_their_text_are_told() -> None:
    class Merging:
        """A tokenizer of pairs: `ab` is one token, and so are a and b."""

        bos_token_id = 9

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [2] * (len(text) // 2)

    assert "other tokens" in str(oddity(Merging(), [0, 1, 0, 1], "abab"))
    assert oddity(Merging(), [2, 2], "abab") is None
    assert "twice" in str(oddity(Merging(), [9, 9, 2], "ab"))
