"""Small run directories written by hand: every number in them is known."""

from __future__ import annotations

import json
from pathlib import Path

from mint.rl.rundir import CheckpointRecord, RolloutRecord, RunDir, TurnRecord, append_jsonl

SCRIPT = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"
STEPS, GROUPS, MEMBERS = 4, 3, 4


def record(step: int, group: int, member: int, **more: object) -> RolloutRecord:
    """Member 0 is right, the others wrong; every per-token figure is different, so that each can be told apart."""
    pieces = [" the", " sum", f" {group}{member}", "."]
    if (step, group, member) == (1, 1, 0):
        pieces = [SCRIPT, " harmless"]
    n = len(pieces)
    reward = 1.0 if member == 0 else 0.0
    fields: dict[str, object] = {
        "step": step, "group": group, "member": member, "policy_version": step, "temperature": 0.9, "reward": reward,
        "reward_terms": {"correct": reward}, "advantage": reward - 0.25, "trained": True, "stop_reason": "completed",
        "problem": f"problem-{group}", "prompt_text": f"Question {group} of step {step}", "prompt_tokens": [1, 2, 3],
        "completion_text": "".join(pieces), "completion_pieces": pieces, "completion_tokens": list(range(10, 10 + n)),
        "mask": [1] * n, "logprobs": [-0.5 - i for i in range(n)], "train_logprobs": [-0.4 - i for i in range(n)],
        "reference_logprobs": [-0.75 - i for i in range(n)], "advantages": [reward - 0.25 + i / 100 for i in range(n)],
        "turns": [TurnRecord(0, n, reward, logs={"reference": "42"})],
    }  # fmt: skip
    return RolloutRecord(**(fields | more))  # type: ignore[arg-type]


def write_step(run: RunDir, step: int, steps: int = STEPS, lift: float = 0.0) -> None:
    run.write_rollouts(step, [record(step, g, m) for g in range(GROUPS) for m in range(MEMBERS)])
    rate = 1 / MEMBERS
    groups = [{"problem": f"problem-{g}", "rate": rate, "of": MEMBERS, "signal": True} for g in range(GROUPS)]
    append_jsonl(run.ledger_file, {"step": step, "groups": groups})
    run.append_metrics(
        step,
        {
            "progress/done_frac": (step + 1) / steps,
            "env/all/reward/total": 0.25 + step / 10 + lift,
            "env/all/reward/success": 0.25,
            "env/all/by_group/frac_mixed": 1.0,
            "env/all/total_ac_tokens": 48,
            "optim/entropy": 1.0 - step / 10,
            "kl_policy_base": 0.01 * step,
            "optim/lr": 1e-4,
            "time/total": 2.0,
            "time/sample:total": 1.5,
            "ledger/solved": 0.0,
            "ledger/learning": 3.0,
            "ledger/dead": 0.0,
        },
    )


def write_run(path: Path, steps: int = STEPS, done: int | None = None, seed: int = 0, lift: float = 0.0) -> RunDir:
    run = RunDir(path)
    run.write_config({"recipe_name": "test", "model_name": "none", "log_path": str(path), "seed": seed, "note": SCRIPT})
    for step in range(steps if done is None else done):
        write_step(run, step, steps, lift)
    run.append_checkpoint(CheckpointRecord("000002", 2, "tinker://x/weights/000002"))
    alarm = {
        "step": 3, "kind": "truncated", "severity": "alarm", "steps": [2, 3], "sentence": f"All are cut off {SCRIPT}",
        "remedy": "Raise max_tokens.", "likelihood": 0.9, "evidence": {"cut_off": 1.0}, "samples": [],
    }  # fmt: skip
    append_jsonl(run.health_file, alarm)
    return run


def write_agent(path: Path) -> RunDir:
    """Two turns with a tool call between them."""
    run = RunDir(path)
    run.write_config({"recipe_name": "agent", "log_path": str(path)})
    pieces = ["<call>", "1+1", "</call>", "tool says", " 2", "It is", " 2"]
    call = [{"name": "calculator", "arguments": {"expression": "1+1"}, "result": "2"}]
    turns = [
        TurnRecord(0, 3, 0.0),
        TurnRecord(5, 7, 1.0, logs={"tool_calls": json.dumps(call)}),
    ]
    some = {
        "completion_pieces": pieces, "completion_text": "".join(pieces), "completion_tokens": list(range(7)),
        "mask": [1, 1, 1, 0, 0, 1, 1], "logprobs": [-0.1] * 7, "train_logprobs": None, "reference_logprobs": None,
        "advantages": None, "advantage": None, "turns": turns,
    }  # fmt: skip
    run.write_rollouts(0, [record(0, 0, member, **some) for member in range(2)])
    run.append_metrics(0, {"progress/done_frac": 1.0, "reward": 0.5})
    return run
