"""The tokenizer a client hands out behaves as the documents show, whatever the version of transformers."""

import copy
import pickle
import subprocess
import sys

import pytest

from mint.client.tokenizers import load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("copied", [lambda t: t, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_the_chat_template_gives_token_ids_unless_a_dict_is_asked_for(copied) -> None:
    tokenizer = copied(load_tokenizer("mint/tiny"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert list(tokenizer.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)) == ids
    assert tokenizer.apply_chat_template([MESSAGES, MESSAGES], add_generation_prompt=True) == [ids, ids]
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == TEXT
    asked = tokenizer.apply_chat_template(MESSAGES, return_dict=True, add_generation_prompt=True)
    assert asked["input_ids"] == ids and set(asked["attention_mask"]) == {1}


def test_a_saved_tokenizer_comes_back_the_same(tmp_path) -> None:
    load_tokenizer("mint/tiny").save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.decode(again.apply_chat_template(MESSAGES, add_generation_prompt=True)) == TEXT


def test_threads_may_ask_for_their_first_tokenizer_at_once() -> None:
    """In a process of its own, where nobody has imported transformers yet."""
    script = """
import threading, time
from mint.client.tokenizers import load_tokenizer
found = []
def ask(seconds):
    time.sleep(seconds)
    found.append(load_tokenizer("mint/tiny").encode("2"))
threads = [threading.Thread(target=ask, args=(n / 50,)) for n in range(40)]  # the import takes a second or so
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 40 and all(tokens == found[0] for tokens in found), found
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
