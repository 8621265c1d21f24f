"""The tokenizer of mint/tiny: one token per byte (so one per ASCII character, id = code point) and eight special ones.

Bytes rather than learned pieces: any string encodes and decodes back, digits never merge, and token positions in
tests can be counted by eye. `<|im_end|>` is the only end: plain completions and chat turns both finish in it.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]  # hidden by skip_special_tokens
TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # text that a parser must see

# ChatML as Qwen writes it; a tool's answer comes back as a user turn. No system prompt is added by itself.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user\\n' -}}
{%- endif -%}
{{- '<tool_response>' + content + '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOLS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # the template goes into the config
    file = folder / "tokenizer_config.json"
    # transformers 5 writes a name of its own for this class, which clients with transformers 4 do not know.
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n")
