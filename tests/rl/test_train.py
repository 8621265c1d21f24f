"""The loop: against a plain loop written out by hand, and claim by claim."""

import asyncio
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mint.rl.hashing import stable_hash
from mint.rl.train import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig, main, split_evenly, train
from mint.rl.types import RLDatasetBuilder
from mint.types import AdamParams, Datum, ModelInput, SamplingParams
from tests.rl.fake_service import VOCAB, Batches, FakeService, HalfBuilder, HalfDataset, base_table
from tests.rl.fakes import CharTokenizer, FakeSamplingClient, FakeTrainingClient


@pytest.fixture
def run(tmp_path):
    """Trains on the fake service; returns (run directory, service)."""
    runs = iter(range(100))

    def go(jitter: float = 0.0, **fields):
        folder = tmp_path / str(next(runs))
        service = FakeService(folder / "service", jitter)
        return train(make_config(folder, **fields), service), service

    return go


def make_config(folder, **fields) -> Config:
    base = {
        "learning_rate": 0.3,
        "dataset_builder": HalfDataset(),
        "model_name": "bigram",
        "recipe_name": "test",
        "max_tokens": 2,
        "log_path": str(folder / "run"),
        "loggers": (),
        "eval_every": 0,
    }
    return Config(**(base | fields))


def rewards(run_dir) -> list[float]:
    return [line["env/all/reward/total"] for line in run_dir.metrics() if "env/all/reward/total" in line]


# --------------------------------------------------------------------------------------------------------------------
# The whole, against a loop without any of the machinery


async def plain_loop(num_steps: int, lag: int, substeps: int) -> np.ndarray:
    """GRPO written out: one request a group, centred rewards, importance sampling, Adam."""
    trainer = FakeTrainingClient(base_table())
    train_set, _ = await HalfDataset()()
    policies = [trainer.table.copy()]
    for step in range(num_steps):
        policy, data = FakeSamplingClient(policies[max(0, step - lag)]), []
        for number, builder in enumerate(train_set.get_batch(step)):
            seed = stable_hash(stable_hash(0, "train", step, number) >> 1, 1) >> 1
            prompt = CharTokenizer().encode(builder.prompt)
            response = await policy.sample_async(
                ModelInput.from_ints(prompt), builder.group_size, SamplingParams(max_tokens=2, seed=seed)
            )
            earned = [sum(t < VOCAB // 2 for t in s.tokens) / len(s.tokens) for s in response.sequences]
            for sequence, reward in zip(response.sequences, earned, strict=True):
                advantage, before = reward - sum(earned) / len(earned), len(prompt) - 1
                full, n = prompt + sequence.tokens, len(sequence.tokens)
                inputs = {
                    "target_tokens": full[1:],
                    "logprobs": [0.0] * before + sequence.logprobs,
                    "advantages": [0.0] * before + [advantage] * n,
                }
                data.append(Datum(ModelInput.from_ints(full[:-1]), inputs))
        for part in np.array_split(np.arange(len(data)), substeps):
            if not any(data[i].loss_fn_inputs["advantages"].to_numpy().any() for i in part):
                continue
            await trainer.forward_backward_async([data[i] for i in part], "importance_sampling")
            await trainer.optim_step_async(AdamParams(0.3, beta2=0.95))
        policies.append(trainer.table.copy())
    return trainer.table


@pytest.mark.parametrize(("lag", "substeps"), [(0, 1), (0, 2), (2, 1), (1, 4)])
def test_the_loop_equals_one_written_out_by_hand(run, lag, substeps):
    _, service = run(jitter=0.002, max_lag=lag, num_substeps=substeps)
    expected = asyncio.run(plain_loop(6, lag, substeps))
    np.testing.assert_allclose(service.trainer.table, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lag", [0, 2])
def test_reward_rises_and_the_holdout_with_it(run, lag):
    run_dir, _ = run(
        learning_rate=0.5, max_lag=lag, max_steps=30, eval_every=30, max_tokens=1,
        dataset_builder=HalfDataset(groups_per_batch=8, group_size=8, tests=16),
    )  # fmt: skip
    earned = rewards(run_dir)
    assert np.mean(earned[:3]) < 0.6 and np.mean(earned[-3:]) > 0.85
    tested = [line["test/env/all/reward/total"] for line in run_dir.metrics() if "test/env/all/reward/total" in line]
    assert len(tested) == 2 and tested[1] > tested[0] + 0.2


def test_the_same_seed_repeats_the_run_and_another_does_not(run):
    (_, first), (_, again), (_, other) = run(jitter=0.003, seed=3), run(seed=3), run(seed=4)
    assert np.array_equal(first.trainer.table, again.trainer.table)
    assert not np.array_equal(first.trainer.table, other.trainer.table)


# --------------------------------------------------------------------------------------------------------------------
# Substeps, minibatches, steps without signal


@pytest.mark.parametrize(("items", "parts", "sizes"), [(7, 3, [2, 2, 3]), (2, 4, [1, 1]), (0, 3, []), (4, 1, [4])])
def test_splitting_evenly_leaves_no_empty_part(items, parts, sizes):
    pieces = split_evenly(list(range(items)), parts)
    assert [len(piece) for piece in pieces] == sizes
    assert [x for piece in pieces for x in piece] == list(range(items))


def test_a_batch_smaller_than_its_substeps_takes_one_step_a_datum(run):
    data = HalfDataset(groups_per_batch=1, group_size=2, num_batches=3)
    run_dir, service = run(num_substeps=8, dataset_builder=data, max_tokens=1, seed=1)
    assert [line["train/optim_steps"] for line in run_dir.metrics()] == [
        line["train/datums"] for line in run_dir.metrics()
    ]
    assert len(service.adam) == sum(line["train/optim_steps"] for line in run_dir.metrics())


@dataclass(frozen=True)
class Solved(HalfBuilder):
    """Everybody earns 1, except for the prompts in `open_problems`."""

    open_problems: tuple[str, ...] = ()

    async def compute_group_rewards(self, trajectory_group, env_group):
        if self.prompt in self.open_problems:
            return [(0.0, {}) for _ in trajectory_group]
        return [(1.0 - sum(t.reward for t in trajectory.transitions), {}) for trajectory in trajectory_group]


@dataclass(frozen=True)
class SolvedDataset(RLDatasetBuilder):
    open_problems: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ("ab", "cd", "ef", "gh", "ij", "kl")

    async def __call__(self):
        made = [Solved(prompt, open_problems=self.open_problems) for prompt in self.prompts]
        return Batches([made[i : i + 2] for i in range(0, len(made), 2)]), None


@pytest.mark.parametrize("remove", [False, True])
def test_a_step_without_signal_is_skipped_so_that_momentum_moves_nothing(run, caplog, remove):
    dataset = SolvedDataset(open_problems=("ab", "cd"))  # only the first step has signal
    with caplog.at_level(logging.WARNING):
        run_dir, service = run(dataset_builder=dataset, remove_constant_reward_groups=remove, holdout=0.0)
    assert [line["train/skipped"] for line in run_dir.metrics()] == [0.0, 1.0, 1.0]
    assert [line["train/datums"] for line in run_dir.metrics()][1:] == [0, 0]
    assert service.trainer.steps == 1
    assert np.array_equal(service.trainer.table, service.samplers[-1].table)
    assert (
        "has no learning signal and was skipped: within each of the 2 groups all members earned the same" in caplog.text
    )


def test_metrics_count_every_group_though_constant_ones_are_left_out(run):
    dataset = SolvedDataset(open_problems=("ab",))
    run_dir, _ = run(dataset_builder=dataset, remove_constant_reward_groups=True, holdout=0.0, max_steps=1)
    (line,) = run_dir.metrics()
    assert line["env/all/by_group/frac_all_good"] == 0.5 and line["env/all/by_group/frac_mixed"] == 0.5
    assert line["env/all/total_episodes"] == 8 and line["train/datums"] <= 4
    trained = {record.problem: record.trained for record in run_dir.rollouts(0) if record.advantage}
    assert trained == {"ab": True}


def test_groups_of_one_are_named_as_the_reason_for_no_signal(run, caplog):
    with caplog.at_level(logging.WARNING):
        run(dataset_builder=HalfDataset(group_size=1), max_steps=1)
    assert "every group has one member" in caplog.text


@pytest.mark.parametrize("substeps", [1, 2])
def test_streaming_minibatches_take_the_same_steps_as_whole_batches(run, substeps):
    data = HalfDataset(groups_per_batch=4, group_size=4)
    _, whole = run(num_substeps=substeps, dataset_builder=data)
    _, stream = run(
        jitter=0.003,
        num_substeps=substeps,
        dataset_builder=data,
        stream_minibatch_config=StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2),
    )
    np.testing.assert_allclose(stream.trainer.table, whole.trainer.table, rtol=0, atol=1e-10)

    def count(service, call):
        return sum(made.startswith(call) for made in service.trainer.calls)

    assert count(stream, "optim_step") == count(whole, "optim_step") == 6 * substeps
    assert count(stream, "forward_backward") > 1.5 * count(whole, "forward_backward")  # minus parts without signal


def test_streaming_trains_before_the_last_group_is_sampled(run):
    """The first gradient goes out while a slow group of the same step is still being sampled."""

    class Slow(HalfBuilder):
        async def compute_group_rewards(self, trajectory_group, env_group):
            await asyncio.sleep(0.1)
            seen.append(list(service.trainer.calls))
            return await super().compute_group_rewards(trajectory_group, env_group)

    @dataclass(frozen=True)
    class Data(RLDatasetBuilder):
        async def __call__(self):
            return Batches([[HalfBuilder("ab"), HalfBuilder("cd"), Slow("ef")]]), None

    seen: list[list[str]] = []
    config = dict(dataset_builder=Data(), stream_minibatch_config=StreamMinibatchConfig(3, 3), seed=1)
    service: FakeService
    captured = FakeService.__init__

    def remember(self, *args, **kwargs):
        nonlocal service
        captured(self, *args, **kwargs)
        service = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeService, "__init__", remember)
        run(**config)
    assert sum(call.startswith("forward_backward") for call in seen[0]) >= 1


# --------------------------------------------------------------------------------------------------------------------
# Lag


def test_lag_is_logged_and_never_exceeds_its_cap(run):
    run_dir, _ = run(jitter=0.003, async_config=AsyncConfig(max_steps_off_policy=2, groups_per_batch=4))
    assert [line["sampling/lag_max"] for line in run_dir.metrics()] == [0, 1, 2, 2, 2, 2]
    assert [line["sampling_client/step_mean"] for line in run_dir.metrics()] == [0, 0, 0, 1, 2, 3]


def test_with_lag_nothing_is_sampled_that_is_not_trained_on(run):
    _, service = run(jitter=0.002, max_lag=3)
    assert sum(len(sampler.requests) for sampler in service.samplers) == 6 * 4


def test_unclipped_ratios_far_off_policy_are_warned_about(run, caplog):
    with caplog.at_level(logging.WARNING):
        run(max_lag=2, max_steps=1)
        assert "does not clip its ratios" in caplog.text
        caplog.clear()
        run(max_lag=2, max_steps=1, loss_fn="ppo")
        run(max_lag=1, max_steps=1)
        assert "does not clip" not in caplog.text


# --------------------------------------------------------------------------------------------------------------------
# Schedules and the optimizer


def test_learning_rate_and_temperature_follow_their_schedules_and_are_logged(run):
    run_dir, service = run(
        learning_rate="linear 0.4 -> 0.1", temperature="linear 1.0 -> 0.5", max_steps=4, beta1=0.8, weight_decay=0.01
    )
    assert [line["optim/lr"] for line in run_dir.metrics()] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [adam.learning_rate for adam in service.adam] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert {(adam.beta1, adam.beta2, adam.eps, adam.weight_decay) for adam in service.adam} == {(0.8, 0.95, 1e-8, 0.01)}
    assert [line["sampling/temperature"] for line in run_dir.metrics()] == pytest.approx([1.0, 5 / 6, 2 / 3, 0.5])
    assert {record.temperature for record in run_dir.rollouts(3)} == {0.5}


def test_aggregation_scales_what_is_sent(run):
    sums, means = (run(aggregation=name, max_steps=1, learning_rate=0.0)[0] for name in ("token_sum", "token_mean"))
    tokens = sums.metrics()[0]["env/all/total_ac_tokens"]
    for one, other in zip(sums.rollouts(0), means.rollouts(0), strict=True):
        np.testing.assert_allclose(one.advantages or [], np.array(other.advantages or []) * tokens, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------------
# KL


def test_a_coefficient_without_a_reference_falls_back_to_the_base_model_with_a_notice(run, caplog):
    with caplog.at_level(logging.WARNING):
        run_dir, _ = run(kl_penalty_coef=0.05)
    assert "KL is measured against the base model, bigram" in caplog.text
    values = [line["kl_policy_base"] for line in run_dir.metrics()]
    assert values[0] == pytest.approx(0, abs=1e-6) and values[-1] > 0


def test_a_reference_without_a_coefficient_is_only_logged(run):
    _, plain = run()
    run_dir, logged = run(kl_reference_config=KLReferenceConfig("bigram"))
    assert "kl_policy_base" in run_dir.metrics()[0]
    assert np.array_equal(plain.trainer.table, logged.trainer.table)


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_measured_kl_falls_as_the_coefficient_rises(run, mode):
    fields = {
        "max_steps": 10,
        "learning_rate": 0.2,
        "max_tokens": 1,
        "kl_mode": mode,
        "kl_reference_config": KLReferenceConfig("bigram"),
        "dataset_builder": HalfDataset(groups_per_batch=8, group_size=8),
    }
    measured = []
    for coef in (0.0, 1.0, 5.0):
        run_dir, _ = run(kl_penalty_coef=coef, **fields)
        measured.append(np.mean([line["kl_policy_base"] for line in run_dir.metrics()[-5:]]))
    assert measured == sorted(measured, reverse=True) and measured[0] > 1.5 * measured[-1] > 0


def test_entropy_rises_with_its_coefficient(run):
    fields = {
        "max_steps": 14,
        "learning_rate": 0.5,
        "max_tokens": 1,
        "dataset_builder": HalfDataset(groups_per_batch=8, group_size=8),
    }
    measured = []
    for coef in (0.0, 1.0, 5.0):
        run_dir, _ = run(entropy_coef=coef, **fields)
        measured.append(np.mean([line["optim/entropy"] for line in run_dir.metrics() if "optim/entropy" in line][-5:]))
    assert measured == sorted(measured) and measured[-1] > 1.1 * measured[0]


def test_a_reference_may_be_any_checkpoint(run, tmp_path):
    trained, service = run(max_steps=2)
    final = trained.last_checkpoint()
    for path in (final.state_path, final.sampler_path):
        config = make_config(
            tmp_path / path.split("/")[3],
            max_steps=1,
            load_checkpoint_path=final.state_path,
            kl_penalty_coef=0.1,
            kl_reference_config=KLReferenceConfig("bigram", load_checkpoint_path=path),
        )
        (line,) = train(config, service).metrics()
        assert line["kl_policy_base"] == pytest.approx(0, abs=1e-6)


def test_post_kl_measures_the_update(run):
    moved, _ = run(compute_post_kl=True, max_steps=1)
    still, _ = run(compute_post_kl=True, max_steps=1, learning_rate=0.0)
    assert moved.metrics()[0]["kl_pre_post_v2"] > 1e-4
    assert still.metrics()[0]["kl_pre_post_v2"] == pytest.approx(0, abs=1e-9)


# --------------------------------------------------------------------------------------------------------------------
# Evaluation


def test_evaluation_happens_at_the_start_on_schedule_and_on_the_final_weights(run):
    run_dir, service = run(eval_every=2, max_steps=5)
    evaluated = [line["step"] for line in run_dir.metrics() if "test/env/all/reward/total" in line]
    assert evaluated == [0, 2, 4, 5] == run_dir.rollout_steps("test")
    assert [record.policy_version for record in run_dir.rollouts(5, "test")] == [5] * 4
    last = run_dir.rollouts(5, "test")[0]
    scored = asyncio.run(
        FakeSamplingClient(service.trainer.table).compute_logprobs_async(
            ModelInput.from_ints(last.prompt_tokens + last.completion_tokens)
        )
    )
    assert last.logprobs == pytest.approx(scored[len(last.prompt_tokens) :])


def test_evaluators_of_ones_own_are_run_too(run):
    async def evaluator(client):
        return {"mine/draws": 1.0}

    run_dir, _ = run(eval_every=3, evaluator_builders=[lambda: evaluator])
    assert [line["step"] for line in run_dir.metrics() if "mine/draws" in line] == [0, 3, 6]


@pytest.mark.parametrize("named", [True, False])
def test_without_a_test_set_some_problems_are_held_out_and_never_trained_on(run, named):
    run_dir, _ = run(dataset_builder=HalfDataset(num_batches=10, tests=0, named=named), eval_every=5, max_steps=20)
    held = {record.prompt_text for record in run_dir.rollouts(0, "test")}
    trained = {record.prompt_text for step in run_dir.rollout_steps() for record in run_dir.rollouts(step)}
    assert held and trained and not held & trained and len(held | trained) == 40
    assert all(line["data/holdout_overlap"] == 0 for line in run_dir.metrics() if "data/holdout_overlap" in line)
    assert "test/gap" in run_dir.metrics()[0]


def test_training_problems_in_the_test_set_are_noticed(run, caplog):
    @dataclass(frozen=True)
    class Leaky(RLDatasetBuilder):
        async def __call__(self):
            train_set = Batches([[HalfBuilder("ab"), HalfBuilder("cd")]])
            return train_set, Batches([[HalfBuilder("cd"), HalfBuilder("ef")]])

    with caplog.at_level(logging.WARNING):
        run_dir, _ = run(dataset_builder=Leaky(), eval_every=1)
    assert run_dir.metrics()[0]["data/holdout_overlap"] == 0.5
    assert "50% of this step's problems are in the test set too" in caplog.text


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints, rollouts, logs


def test_checkpoints_are_made_on_schedule_and_at_the_end_which_alone_stays_for_ever(run):
    run_dir, service = run(save_every=2, max_steps=5, ttl_seconds=4000)
    assert [(r.batch, r.final) for r in run_dir.checkpoints()] == [(2, False), (4, False), (5, True)]
    saves = [call for call in service.trainer.calls if call.startswith("save_state")]
    assert saves == ["save_state 000002 4000", "save_state 000004 4000", "save_state 000005 None"]
    assert np.array_equal(service.load(run_dir.last_checkpoint().sampler_path)[0], service.trainer.table)


def test_rolling_checkpoints_replace_each_other(run):
    run_dir, service = run(save_every=4, rolling_save_every=1, max_steps=6)
    assert [(r.batch, r.rolling) for r in run_dir.checkpoints()] == [
        (1, True), (2, True), (3, True), (4, False), (5, True), (6, False)
    ]  # fmt: skip
    assert [path.rsplit("/")[-1] for path in service.deleted] == ["000001", "000002", "000003", "000005"]


def test_rollouts_hold_every_token_with_what_was_sent_and_what_came_back(run):
    run_dir, _ = run(max_steps=1, kl_penalty_coef=0.1)
    records = run_dir.rollouts(0)
    assert [(r.group, r.member) for r in records] == [(g, m) for g in range(4) for m in range(4)]
    for record in records:
        assert record.prompt_text + record.completion_text == CharTokenizer().decode(
            record.prompt_tokens + record.completion_tokens
        )
        assert "".join(record.completion_pieces) == record.completion_text
        assert record.mask == [1] * len(record.completion_tokens)
        assert record.reward == record.reward_terms["first_half"]
        np.testing.assert_allclose(record.train_logprobs, record.logprobs, atol=1e-5)
        np.testing.assert_allclose(record.advantages, record.advantage, atol=1e-5)  # no KL yet: the policy is the base


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_rollouts_hold_the_log_probs_of_the_kl_reference(run, mode):
    run_dir, _ = run(max_steps=2, kl_penalty_coef=0.1, kl_mode=mode)
    measured = [line["kl_policy_base"] for line in run_dir.metrics() if "kl_policy_base" in line]
    for step, kl in enumerate(measured):
        records = [record for record in run_dir.rollouts(step) if record.trained]
        differences = [
            p - q for r in records for p, q in zip(r.logprobs, r.reference_logprobs, strict=True)
        ]  # every token is sampled here
        assert np.mean(differences) == pytest.approx(kl, abs=1e-5)
    assert measured[1] != pytest.approx(0, abs=1e-4)
    without, _ = run(max_steps=1)
    assert all(record.reference_logprobs is None for record in without.rollouts(0))


def test_only_some_groups_are_written_where_not_all_are_wanted(run):
    run_dir, _ = run(rollout_json_export=False, num_groups_to_log=2, max_steps=1)
    means = {}
    for record in run_dir.rollouts(0):
        means.setdefault(record.group, []).append(record.reward)
    everything, _ = run(max_steps=1)
    all_means = {}
    for record in everything.rollouts(0):
        all_means.setdefault(record.group, []).append(record.reward)
    chosen = [np.mean(r) for r in means.values()]
    assert len(means) == 2
    assert max(chosen) == max(np.mean(r) for r in all_means.values())
    assert min(chosen) == min(np.mean(r) for r in all_means.values())


def test_samples_of_every_step_and_a_chart_of_its_time_are_written(run):
    run_dir, _ = run(samples_per_step=2, max_steps=3, enable_trace=True, span_chart_every=2)
    assert run_dir.log_file.read_text().count("completion:") == 6
    assert run_dir.trace_file.is_file()
    assert sorted(p.name for p in run_dir.path.glob("*.html")) == ["timing_000000.html", "timing_000002.html"]


def test_a_group_that_fails_is_counted_and_done_without_if_failures_are_tolerated(run):
    class Broken(HalfBuilder):
        async def make_envs(self):
            raise OSError("no sandbox")

    @dataclass(frozen=True)
    class Data(RLDatasetBuilder):
        async def __call__(self):
            return Batches([[HalfBuilder("ab"), Broken("cd")]]), None

    run_dir, _ = run(dataset_builder=Data(), rollout_error_tolerance=True, seed=1)
    (line,) = run_dir.metrics()
    assert line["rollout_errors/OSError"] == 1 and line["rollout_errors/groups_skipped"] == 1
    assert line["env/all/total_episodes"] == 4
    with pytest.raises(OSError, match="no sandbox"):
        run(dataset_builder=Data())


def test_a_run_that_fails_keeps_its_checkpoint_and_can_be_resumed(tmp_path):
    class Flaky(HalfBuilder):
        async def make_envs(self):
            if healthy:
                return await super().make_envs()
            raise OSError("no sandbox")

    @dataclass(frozen=True)
    class Data(RLDatasetBuilder):
        async def __call__(self):
            return Batches([[HalfBuilder("ab")], [HalfBuilder("cd")], [Flaky("ef")]]), None

    healthy = False
    config = make_config(tmp_path, dataset_builder=Data(), save_every=2, holdout=0.0)
    with pytest.raises(OSError, match="no sandbox"):
        train(config, FakeService(tmp_path / "service"))
    healthy = True
    run_dir = train(config, FakeService(tmp_path / "service"))
    assert [r.batch for r in run_dir.checkpoints()] == [2, 3]
    assert [line["step"] for line in run_dir.metrics()] == [0, 1, 2]


# --------------------------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.parametrize("lag", [0, 2])
def test_ctrl_c_saves_says_how_to_resume_and_changes_nothing_in_the_end(run, tmp_path, caplog, lag):
    whole, unbroken = run(max_lag=lag, max_steps=6)
    config = make_config(tmp_path / "stopped", max_lag=lag, max_steps=6)

    class Presses(FakeService):
        presses = 0

        def sampler(self, table, version=0):
            if version == 3 and not Presses.presses:
                Presses.presses = 1
                os.kill(os.getpid(), signal.SIGINT)
            return super().sampler(table, version)

    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        train(config, Presses(tmp_path / "service", jitter=0.01))
    assert "To go on, run the same again with log_path=" in caplog.text
    stopped = train(config, resumed := FakeService(tmp_path / "service"))
    assert stopped.checkpoints()[0].batch == 3
    assert [line["step"] for line in stopped.metrics()] == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(resumed.trainer.table, unbroken.trainer.table)
    assert rewards(stopped) == rewards(whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Stuck(HalfBuilder):
        async def compute_group_rewards(self, trajectory_group, env_group):
            await asyncio.sleep(600)

    @dataclass(frozen=True)
    class Data(RLDatasetBuilder):
        async def __call__(self):
            return Batches([[HalfBuilder("ab")], [Stuck("cd")]]), None

    def press_twice():
        for _ in range(2):
            time.sleep(0.4)
            os.kill(os.getpid(), signal.SIGINT)

    config = make_config(tmp_path, dataset_builder=Data(), max_lag=1, holdout=0.0, seed=1)
    threading.Thread(target=press_twice).start()
    with pytest.raises(KeyboardInterrupt):
        train(config, FakeService(tmp_path / "service"))


def test_the_loop_runs_inside_an_event_loop_that_is_already_there(tmp_path):
    async def notebook_cell():
        return await main(make_config(tmp_path, max_steps=1), FakeService(tmp_path / "service"))

    assert len(asyncio.run(notebook_cell()).metrics()) == 1


def test_a_config_can_be_varied_by_replacing_fields(tmp_path):
    assert replace(make_config(tmp_path), max_lag=4).lag == 4
