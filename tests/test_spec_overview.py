"""The code blocks of the RL overview, as written, with the elisions filled in and no server configured.

The model they name, Qwen/Qwen3-0.6B, is found in a Hugging Face cache made for the test, which holds the bundled model
under that name: the same architecture, a thousandth of the size.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import mint

MINIMAL_LOOP = """
import mint
from mint import types
service_client = mint.ServiceClient()
training_client = service_client.create_lora_training_client(
    base_model="Qwen/Qwen3-0.6B",
    rank=16,
    train_mlp=True,
    train_attn=True,
    train_unembed=True,
)
tokenizer = training_client.get_tokenizer()
adam_params = types.AdamParams(learning_rate=2e-5)
for step in range(num_steps):
    # 1. Sample from current policy
    sampling_client = training_client.save_weights_and_get_sampling_client(
        name=f"rl-step-{step}"
    )
    # 2. Collect samples and compute rewards (see RL demos)
    training_datums: list[types.Datum] = collect(sampling_client)
    # 3. Train with importance sampling
    training_client.forward_backward(
        training_datums,
        loss_fn="importance_sampling"
    ).result()
    training_client.optim_step(adam_params).result()
"""

PROMPTING = """
prompt_tokens = tokenizer.encode("Q: What is 3 + 5?\\nA:")
result = sampling_client.sample(
    prompt=types.ModelInput.from_ints(tokens=prompt_tokens),
    num_samples=8,  # Sample 8 responses per prompt
    sampling_params=types.SamplingParams(
        max_tokens=16,
        temperature=0.8,  # Exploration; higher = more diversity
        stop_token_ids=[tokenizer.eos_token_id],
    ),
).result()
for seq in result.sequences:
    response_text = tokenizer.decode(seq.tokens)
    logprobs = seq.logprobs or [0.0] * len(seq.tokens)
"""

OUTPUT_FORMAT = """
g_rewards, g_responses, g_logprobs = [], [], []
for seq in res.sequences:
    txt = tokenizer.decode(seq.tokens)
    reward = 1.0 if extract_answer(txt) == gold_answer else 0.0
    g_rewards.append(reward)
    g_responses.append(list(seq.tokens))
    g_logprobs.append(list(seq.logprobs or [0.0] * len(seq.tokens)))
mean_r = sum(g_rewards) / len(g_rewards)
advs = [r - mean_r for r in g_rewards]
for resp_tok, lp, adv in zip(g_responses, g_logprobs, advs):
    if not resp_tok:
        continue
    full = prompt_tokens + resp_tok
    prefix = len(prompt_tokens) - 1
    datums.append(
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens=full[:-1]),
            loss_fn_inputs={
                "target_tokens": full[1:],
                "weights": [0.0] * prefix + [1.0] * len(resp_tok),
                "logprobs": [0.0] * prefix + lp,
                "advantages": [0.0] * prefix + [adv] * len(resp_tok),
            },
        )
    )
"""

USAGE = """
adam_params = types.AdamParams(learning_rate=2e-5)
result = training_client.forward_backward(
    datums,
    loss_fn="importance_sampling"
).result()
training_client.optim_step(adam_params).result()
"""

SCRIPT = f"""
num_steps = 2

def extract_answer(text):
    return text.strip().split("<")[0]

def collect(sampling_client):
    datums, gold_answer = [], "8"
{textwrap.indent(PROMPTING, "    ")}
    assert len(result.sequences) == 8
    res = result
{textwrap.indent(OUTPUT_FORMAT, "    ")}
    return datums
{MINIMAL_LOOP}
datums = training_datums
{USAGE}
assert len(result.loss_fn_outputs) == len(datums) > 0
print("ran as written")
"""


def cache_with(name: str, folder: Path, home: Path) -> None:
    """A Hugging Face cache under `home` in which Hub id `name` is the model in `folder`."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def test_the_overview_runs_as_written(tmp_path: Path) -> None:
    cache_with("Qwen/Qwen3-0.6B", Path(mint.__file__).parent / "models" / "tiny", tmp_path / "hf")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MINT_", "TINKER_"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "MINT_HOME": str(tmp_path / "home")}
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().endswith("ran as written")
