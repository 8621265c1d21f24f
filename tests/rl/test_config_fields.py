"""Every field of `Config` changes what a run does: what it asks the service, or what it writes. None is there for show.

Two runs on the fake service that differ in one field are compared by their traces; `VARIATIONS` names every field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import mint
from mint.rl.config import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig
from mint.rl.loggers import LOGGERS, NullLogger, RunInfo
from mint.rl.rollout_limits import TerminationRewardPolicy
from mint.rl.train import train
from mint.rl.types import Env, EnvGroupBuilder, RLDataset, StepResult, StopReason
from tests.rl.fake_service import Batches, FakeService, HalfBuilder, HalfDataset, HalfEnv, ServedTrainer, base_table
from tests.rl.fakes import Ready
from tests.rl.test_train import make_config


class Recorder(FakeService):
    """Remembers every request with all it says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []

    def _trainer(self, table: Any) -> ServedTrainer:
        trainer = RecordedTrainer(table.copy(), service=self, model_id=f"model-{len(self.trainers)}")
        self.trainers.append(trainer)
        return trainer

    def sampler(self, *args: Any) -> Any:
        sampler = super().sampler(*args)
        sample = sampler.sample_async

        async def recorded(*given: Any, **named: Any) -> Any:
            self.asked.append(f"sample {given} {named}")
            return await sample(*given, **named)

        sampler.sample_async = recorded
        return sampler

    async def create_lora_training_client_async(self, *args: Any, **named: Any) -> Any:
        self.asked.append(f"create {args} {named}")
        return await super().create_lora_training_client_async(*args, **named)

    async def create_training_client_from_state_async(self, path: str) -> Any:
        self.asked.append(f"from state {path}")
        return await super().create_training_client_from_state_async(path)

    async def create_sampling_client_async(self, **named: Any) -> Any:
        self.asked.append(f"sampling client {named}")
        return await super().create_sampling_client_async(**named)


class RecordedTrainer(ServedTrainer):
    async def forward_backward_async(self, data: Sequence[Any], *args: Any, **named: Any) -> Any:
        self.service.asked.append(f"forward_backward {data} {args} {named}")  # type: ignore[attr-defined]
        return await super().forward_backward_async(data, *args, **named)

    async def optim_step_async(self, adam_params: Any) -> Any:
        self.service.asked.append(f"optim_step {adam_params}")  # type: ignore[attr-defined]
        return await super().optim_step_async(adam_params)


def written(folder: Path) -> dict[str, Any]:
    """What the run directory says, but for the configuration itself, times and addresses."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if name in ("config.json", "code.diff"):
            continue
        if path.suffix == ".jsonl" and not name.startswith(("trace", "timing")):
            found[name] = [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif name == "logs.log":
            found[name] = len(path.read_text().splitlines())
        else:
            found[name] = None
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        passing = ("time", "seconds", "path", "per_s")
        return {key: _timeless(item) for key, item in value.items() if not any(word in key for word in passing)}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def trace(folder: Path, **settings: Any) -> tuple[list[str], list[str], dict[str, Any]]:
    service = Recorder(folder / "service")
    service.store("tinker://x/weights/start", (base_table() + 1, None, 0))
    run_dir = train(make_config(folder, **settings), service)
    saves = [call for trainer in service.trainers for call in trainer.calls]
    # Groups are sampled at the same time; which one is asked for first is nobody's business.
    return sorted(service.asked), saves + service.deleted, written(run_dir.path)


# ------------------------------------------------------------------------------------------------ odd environments


class Failing(HalfEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        if self.prompt.endswith("a"):
            raise RuntimeError("the tool is broken")
        return await super().step(action, extra=extra)


class Limited(HalfEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        reason = StopReason.MAX_TURNS if action[0] % 2 else None
        return replace(await super().step(action, extra=extra), stop_reason=reason)


@dataclass(frozen=True)
class OddBuilder(HalfBuilder):
    env: type[HalfEnv] = HalfEnv

    async def make_envs(self) -> Sequence[Env]:
        return [self.env(self.prompt) for _ in range(self.group_size)]


@dataclass(frozen=True)
class Odd(HalfDataset):
    """The same problems in another environment, or every other one in a group of one, which is without signal."""

    env: type[HalfEnv] = HalfEnv
    lone: bool = False

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        data, tests = await super().__call__()
        batches: list[list[EnvGroupBuilder]] = []
        for index in range(len(data)):
            prompts = [builder.problem_id() or "" for builder in data.get_batch(index)]
            sizes = [1 if self.lone and n % 2 else self.group_size for n in range(len(prompts))]
            batches.append([OddBuilder(p, size, env=self.env) for p, size in zip(prompts, sizes, strict=True)])
        return Batches(batches), tests


# ------------------------------------------------------------------------------------------------ the fields

KL = {"kl_penalty_coef": 0.1}
FINAL = {"max_steps": 3}
EVALUATED = {"eval_every": 2, **FINAL}


class Clueless:
    async def __call__(self, sampling_client: Any) -> dict[str, float]:
        return {"mine/clue": 0.0}


# field -> (settings both runs have, the value of one of them); what cannot be seen on the fake service has a test of
# its own below.
VARIATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "learning_rate": (FINAL, 0.1),
    "dataset_builder": (FINAL, HalfDataset(group_size=3)),
    "model_name": (FINAL, "trigram"),
    "max_tokens": (FINAL, 3),
    "eval_every": (FINAL, 1),
    "save_every": (FINAL, 1),
    "max_steps": ({}, 2),
    "seed": (FINAL, 1),
    "evaluator_builders": (EVALUATED, (Clueless,)),
    "holdout": ({**EVALUATED, "dataset_builder": HalfDataset(tests=0)}, 0.5),
    "load_checkpoint_path": (FINAL, "tinker://x/weights/start"),
    "renderer_name": (FINAL, "plain"),
    "lora_rank": (FINAL, 4),
    "loss_fn": (FINAL, "ppo"),
    "loss_fn_config": ({**FINAL, "loss_fn": "ppo"}, {"clip_high_threshold": 1.01}),
    "advantage": (FINAL, "group_std"),
    "aggregation": (FINAL, "token_mean"),
    "aggregation_divisor": ({**FINAL, "aggregation": "constant"}, 7.0),
    "num_substeps": (FINAL, 2),
    "beta1": (FINAL, 0.5),
    "beta2": (FINAL, 0.5),
    "eps": (FINAL, 1e-3),
    "weight_decay": (FINAL, 0.1),
    "grad_clip_norm": (FINAL, 0.5),
    "send_weights": (FINAL, False),
    "kl_penalty_coef": (FINAL, 0.1),
    "kl_discount_factor": ({**FINAL, **KL}, 0.5),
    "kl_reference_config": ({**FINAL, **KL}, KLReferenceConfig("trigram")),
    "kl_mode": ({**FINAL, **KL}, "loss"),
    "kl_estimator": ({**FINAL, **KL, "kl_mode": "loss"}, "k3"),
    "entropy_coef": (FINAL, 0.1),
    "temperature": (FINAL, 0.7),
    "remove_constant_reward_groups": ({**FINAL, "dataset_builder": Odd(lone=True)}, True),
    "dynamic_sampling": ({"max_steps": 2, "dataset_builder": Odd(lone=True)}, 1),
    "difficulty_band": (FINAL, (0.4, 0.6)),
    "mask_truncated": (FINAL, True),
    "overlong_buffer": (FINAL, 2),
    "overlong_penalty": ({**FINAL, "overlong_buffer": 2}, 3.0),
    "rollout_error_tolerance": ({**FINAL, "dataset_builder": Odd(env=Failing)}, True),
    "termination": ({**FINAL, "dataset_builder": Odd(env=Limited)}, TerminationRewardPolicy(zero_reward_on_limit=True)),
    "max_lag": (FINAL, 1),
    "async_config": (FINAL, AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)),
    "stream_minibatch_config": (FINAL, StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2)),
    "compute_post_kl": (FINAL, True),
    "samples_per_step": (FINAL, 0),
    "rollout_json_export": ({**FINAL, "num_groups_to_log": 1}, False),
    "num_groups_to_log": ({**FINAL, "rollout_json_export": False}, 1),
    "ttl_seconds": ({**FINAL, "save_every": 1}, 60),
    "rolling_save_every": (FINAL, 1),
    "rolling_ttl_seconds": ({**FINAL, "rolling_save_every": 1}, 60),
    "doctor_every": (FINAL, 0),
    "enable_trace": (FINAL, True),
    "span_chart_every": (FINAL, 1),
}
ELSEWHERE = {
    "recipe_name": "test_the_server_is_asked_at_the_address_and_told_the_recipe",
    "base_url": "test_the_server_is_asked_at_the_address_and_told_the_recipe",
    "log_path": "test_the_run_is_written_where_it_was_asked_to",
    "loggers": "test_the_loggers_asked_for_are_made_with_the_names_given",
    "wandb_project": "test_the_loggers_asked_for_are_made_with_the_names_given",
    "wandb_name": "test_the_loggers_asked_for_are_made_with_the_names_given",
    "rollback": "tests/rl/test_rollback.py",
    "budget_tokens": "tests/rl/test_budget.py",
    "budget_seconds": "tests/rl/test_budget.py",
}


def test_no_field_is_left_out() -> None:
    assert sorted({**VARIATIONS, **ELSEWHERE}) == sorted(field.name for field in fields(Config))
    assert not set(VARIATIONS) & set(ELSEWHERE)


def test_equal_settings_leave_equal_traces(tmp_path: Path) -> None:
    assert trace(tmp_path / "a", **FINAL) == trace(tmp_path / "b", **FINAL)


@pytest.mark.parametrize("name", list(VARIATIONS))
def test_a_field_changes_what_the_run_does(name: str, tmp_path: Path) -> None:
    settings, value = VARIATIONS[name]
    varied = trace(tmp_path / "varied", **settings | {name: value})
    try:
        plain = trace(tmp_path / "plain", **settings)
    except Exception as error:  # the one field whose default is to raise
        assert name == "rollout_error_tolerance", error
        return
    assert varied != plain


def test_the_server_is_asked_at_the_address_and_told_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Service(FakeService):
        def __init__(self, base_url: str, user_metadata: dict[str, str]) -> None:
            super().__init__(tmp_path / "service")
            asked.append((base_url, user_metadata))

        def close(self) -> Ready[None]:
            return Ready(None)

    monkeypatch.setattr(mint, "ServiceClient", Service)
    train(make_config(tmp_path, max_steps=1, base_url="http://there:1", recipe_name="mine"))
    assert asked == [("http://there:1", {"recipe_name": "mine"})]


def test_the_run_is_written_where_it_was_asked_to(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(make_config(tmp_path / name, max_steps=1), FakeService(tmp_path / name / "service"))
        assert (tmp_path / name / "run" / "metrics.jsonl").exists()


def test_the_loggers_asked_for_are_made_with_the_names_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str | None, str | None]] = []

    def maker(kind: str) -> Any:
        def make(info: RunInfo) -> NullLogger:
            made.append((kind, info.project, info.name))
            return NullLogger()

        return make

    for kind in list(LOGGERS):
        monkeypatch.setitem(LOGGERS, kind, maker(kind))
    settings = {"max_steps": 1, "loggers": ("tensorboard",), "wandb_project": "p", "wandb_name": "n"}
    train(make_config(tmp_path, **settings), FakeService(tmp_path / "service"))
    assert made == [("tensorboard", "p", "n"), ("wandb", "p", "n")]
