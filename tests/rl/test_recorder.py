"""A loop on the raw client, recorded: the run directory holds what was sampled, sent and earned."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mint
from mint.errors import BadRequest
from mint.rl.doctor import diagnose, mask
from mint.rl.doctor.evidence import read_evidence
from mint.rl.ledger import Ledger
from mint.rl.recorder import Recorder
from mint.rl.rundir import RunDir
from mint.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

ADAM = AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def client(tiny_server: str) -> mint.TrainingClient:
    return mint.ServiceClient(tiny_server).create_lora_training_client("mint/tiny", rank=4, seed=0)


@pytest.fixture
def run(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "run", {"note": "mine"}, every=1, say=lambda text: None)


def datum(prompt: list[int], sequence: SampledSequence, advantage: float, weights: bool = False) -> Datum:
    whole, before = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    inputs: dict[str, Any] = {
        "target_tokens": whole[1:],
        "logprobs": before + list(sequence.logprobs or []),
        "advantages": before + [advantage] * len(sequence.tokens),
    }
    if weights:
        inputs["weights"] = before + [1.0] * len(sequence.tokens)
    return Datum(ModelInput.from_ints(whole[:-1]), inputs)


def params(seed: int, **given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.9, "seed": seed} | given)


def prompts_of(trainer: Any) -> list[list[int]]:
    return [trainer.get_tokenizer().encode(f"Q: What is {a} + {b}?\nA:") for a, b in ((1, 2), (30, 40), (5, 77))]


def a_step(run: Recorder, trainer: Any, sampler: Any, change: Callable[[list[Datum]], list[Datum]] = list) -> None:
    data = []
    for number, prompt in enumerate(prompts_of(trainer)):
        sequences = sampler.sample(ModelInput.from_ints(prompt), 4, params(10 * run.step + number)).result().sequences
        for member, sequence in enumerate(sequences):
            run.score(sequence, float(member), response="42", reference="43", problem=f"p{number}")
            data.append(datum(prompt, sequence, member - 1.5, weights=True))
    trainer.forward_backward(change(data), "importance_sampling")
    trainer.optim_step(ADAM)
    run.end_step({"mine": 7.0})


def test_what_went_over_the_wire_is_in_the_run_directory(client, run):
    trainer = run.watch(client)
    for _ in range(2):
        a_step(run, trainer, trainer.save_weights_and_get_sampling_client())
    config, lines, records = run.run_dir.config(), run.run_dir.metrics(), run.run_dir.rollouts(1)
    assert (config["note"], config["loss_fn"], config["temperature"], config["max_tokens"]) == (
        "mine", "importance_sampling", 0.9, 6,
    )  # fmt: skip
    assert [line["step"] for line in lines] == [0, 1] and lines[1]["mine"] == 7.0
    assert len(Ledger(run.run_dir, 2).visits) == 3
    assert lines[1]["optim/lr"] == 1e-3 and lines[1]["train/datums"] == 12 and lines[1]["train/unknown_datums"] == 0
    assert lines[1]["env/all/reward/total"] == 1.5 and lines[1]["optim/kl_sample_train_max"] < 1e-4
    assert [(r.group, r.member, r.problem) for r in records] == [(g, m, f"p{g}") for g in range(3) for m in range(4)]
    for record in records:
        assert (record.policy_version, record.temperature, record.trained) == (1, 0.9, True)
        assert record.advantage == pytest.approx(record.member - 1.5) and record.reward == record.member
        assert record.turns[0].logs == {"response": "42", "reference": "43"}
        assert np.allclose(record.logprobs, record.train_logprobs, atol=1e-4)
        assert record.advantages == pytest.approx([record.member - 1.5] * len(record.completion_tokens))


def test_the_policy_that_answered_is_known_whatever_the_loop_believes(client, run):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    for _ in range(8):
        a_step(run, trainer, sampler)
    assert [record.policy_version for record in run.run_dir.rollouts(7)] == [0] * 12
    assert "staleness" in {finding.kind for finding in diagnose(run.run_dir)}


def test_a_step_without_an_update_makes_no_new_policy(client, run):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    for _ in range(2):
        sequence = sampler.sample(ModelInput.from_ints([5, 6]), 1, params(0)).result().sequences[0]
        run.score(sequence, 1.0)
        run.end_step()
    assert run.run_dir.rollouts(1)[0].policy_version == 1
    assert run.run_dir.metrics()[1]["train/skipped"] == 1.0


def test_datums_lost_repeated_or_never_sampled_are_counted(client, run):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    a_step(run, trainer, sampler, lambda data: data[::2])
    records = run.run_dir.rollouts(0)
    assert [record.trained for record in records] == [True, False] * 6
    assert [record.advantage is None for record in records] == [False, True] * 6

    def cut(data: list[Datum]) -> list[Datum]:
        kept = [Datum(ModelInput.from_ints(d.model_input.to_ints()[:-1]), shorter(d)) for d in data]
        trainer.forward_backward(kept, "importance_sampling")
        return kept

    a_step(run, trainer, sampler, cut)
    metrics = run.run_dir.metrics()[1]
    assert metrics["train/unknown_datums"] == 24 and metrics["train/datums_repeated"] == 12


def shorter(datum: Datum) -> dict[str, list[float]]:
    return {name: value.to_numpy()[:-1].tolist() for name, value in datum.loss_fn_inputs.items()}


def test_an_episode_of_two_turns_is_one_rollout(client, run):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = prompts_of(trainer)[0]
    data = []
    for member in range(2):
        first = sampler.sample(ModelInput.from_ints(prompt), 1, params(member)).result().sequences[0]
        between = prompt + first.tokens + [40, 41]
        second = sampler.sample(ModelInput.from_ints(between), 1, params(9 + member)).result().sequences[0]
        run.score([first, second], float(member), metrics={"correct": 1.0})
        whole, n = between + second.tokens, len(prompt) - 1
        logprobs = [0.0] * n + list(first.logprobs) + [0.0] * 2 + list(second.logprobs)
        sampled = [0.0] * n + [1.0] * len(first.tokens) + [0.0] * 2 + [1.0] * len(second.tokens)
        inputs = {"target_tokens": whole[1:], "logprobs": logprobs, "advantages": [(member - 0.5) * m for m in sampled]}
        data.append(Datum(ModelInput.from_ints(whole[:-1]), inputs))
    trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(ADAM)
    run.end_step()
    records = run.run_dir.rollouts(0)
    assert [(r.group, r.member, len(r.turns), r.trained) for r in records] == [(0, 0, 2, True), (0, 1, 2, True)]
    assert sum(records[0].mask) == len(records[0].completion_tokens) - 2
    assert records[1].reward_terms == {"correct": 1.0} and records[1].advantage == pytest.approx(0.5)
    gaps = np.array(records[1].logprobs) - np.array(records[1].train_logprobs)
    assert np.abs(gaps).max() < 1e-4


def two_turns(run: Recorder, sampler: Any, prompt: list[int], member: int, continues: bool) -> list[tuple]:
    """An episode, scored: prompt and answer of both turns."""
    first = sampler.sample(ModelInput.from_ints(prompt), 1, params(member)).result().sequences[0]
    after = [*prompt, *first.tokens, 40, 41] if continues else [42, 43, 44 + member]
    second = sampler.sample(ModelInput.from_ints(after), 1, params(9 + member)).result().sequences[0]
    run.score([first, second], float(member), group="all")
    return [(prompt, first), (after, second)]


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
def test_turns_sent_in_datums_of_their_own_are_found_again(client, run, continues, backwards):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = prompts_of(trainer)[0]
    data = [
        datum(asked, said, member - 0.5)
        for member in range(2)
        for asked, said in two_turns(run, sampler, prompt, member, continues)
    ]
    trainer.forward_backward(data[::-1] if backwards else data, "importance_sampling")
    trainer.optim_step(ADAM)
    run.end_step()
    metrics, records = run.run_dir.metrics()[0], run.run_dir.rollouts(0)
    assert metrics["train/unknown_datums"] == metrics["train/unsampled_tokens"] == 0
    for record in records:
        expected = [(record.member - 0.5) * sampled for sampled in record.mask]
        assert record.advantages == pytest.approx(expected) and record.advantage == pytest.approx(record.member - 0.5)
        gaps = np.array(record.logprobs) - np.array(record.train_logprobs)
        assert np.abs(gaps[np.array(record.mask, dtype=bool)]).max() < 1e-4


def test_advantages_outside_what_was_sampled_are_counted_and_turns_without_any_are_seen(client, run):
    trainer = run.watch(client)
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = prompts_of(trainer)[0]
    for environment, first_turn in ((1.0, 1.0), (0.0, 0.0)):
        data = []
        for member in range(16):
            (_, first), (after, second) = two_turns(run, sampler, prompt, member, continues=True)
            whole = datum(after, second, member - 7.5)
            before = [0.0] * (len(prompt) - 1) + [first_turn] * len(first.tokens) + [environment] * 2
            inputs = whole.loss_fn_inputs
            advantages = before + inputs["advantages"].tolist()[len(before) :]
            data.append(Datum(whole.model_input, {**inputs, "advantages": advantages}))
        trainer.forward_backward(data, "importance_sampling", {"unchecked": 1})
        trainer.optim_step(ADAM)
        run.end_step()
    assert [line["train/unsampled_tokens"] for line in run.run_dir.metrics()] == [32.0, 0.0]
    evidence = read_evidence(run.run_dir)
    found = [[f.sentence for f in mask.check(evidence.window(step, step))] for step in range(2)]
    assert len(found[0]) == 1 and "32 tokens" in found[0][0] and "tool" in found[0][0]
    assert len(found[1]) == 1 and "100% of the trained episodes" in found[1][0] and "only the last turn" in found[1][0]


def test_an_evaluation_is_kept_apart(client, run):
    trainer = run.watch(client)
    a_step(run, trainer, trainer.save_weights_and_get_sampling_client())
    sampler = trainer.save_weights_and_get_sampling_client()
    with run.evaluation():
        sequence = sampler.sample(ModelInput.from_ints([5, 6]), 1, params(0)).result().sequences[0]
        run.score(sequence, 0.25)
    assert run.run_dir.rollouts(1, "test")[0].reward == 0.25
    assert [e.version for e in read_evidence(run.run_dir).evaluations] == [1] and run.run_dir.rollout_steps() == [0]


def test_the_async_twins_are_watched_too(client, run):
    async def loop() -> None:
        trainer = run.watch(client)
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        prompt = prompts_of(trainer)[0]
        response = await sampler.sample_async(ModelInput.from_ints(prompt), 2, params(0))
        for member, sequence in enumerate(response.sequences):
            run.score(sequence, float(member))
        data = [datum(prompt, s, m - 0.5) for m, s in enumerate(response.sequences)]
        await trainer.forward_backward_async(data, "importance_sampling")
        await trainer.optim_step_async(ADAM)

    asyncio.run(loop())
    run.end_step()
    assert [record.trained for record in run.run_dir.rollouts(0)] == [True, True]


def test_answers_of_other_clients_and_old_directories_are_refused(client, run, tmp_path):
    stranger = client.save_weights_and_get_sampling_client()
    sequence = stranger.sample(ModelInput.from_ints([5, 6]), 1, params(0)).result().sequences[0]
    with pytest.raises(BadRequest, match="1 of 1 scored answers were not sampled through a watched client"):
        run.score(sequence, 1.0)
    with pytest.raises(BadRequest, match="already holds a run"):
        Recorder(run.run_dir.path)
    assert RunDir(Recorder(run.run_dir.path, overwrite=True).run_dir.path).metrics() == []
