"""Client, wire, server and engine together, on the bundled model: what a user relies on, claim by claim."""

import math
from pathlib import Path

import numpy as np
import pytest

import mint
from mint import types

PROMPT = "Q: What is 47 + 38?\nA:"


def new_trainer(service: mint.ServiceClient, seed: int = 0, **flags: bool) -> mint.TrainingClient:
    return service.create_lora_training_client("mint/tiny", rank=8, seed=seed, **flags)


def sft_datum(trainer: mint.TrainingClient, text: str = PROMPT, answer: str = " 85") -> types.Datum:
    tokenizer = trainer.get_tokenizer()
    prompt, response = tokenizer.encode(text), [*tokenizer.encode(answer), tokenizer.eos_token_id]
    full = prompt + response
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(response)
    return types.Datum(types.ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:], "weights": weights})


def rl_datums(
    trainer: mint.TrainingClient, sampler: mint.SamplingClient, temperature: float = 1.0
) -> list[types.Datum]:
    prompt = trainer.get_tokenizer().encode(PROMPT)
    params = types.SamplingParams(max_tokens=6, temperature=temperature, seed=3)
    sequences = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
    data = []
    for n, sequence in enumerate(sequences):
        full, length, prefix = prompt + sequence.tokens, len(sequence.tokens), len(prompt) - 1
        inputs = {
            "target_tokens": full[1:],
            "weights": [0.0] * prefix + [1.0] * length,
            "logprobs": [0.0] * prefix + sequence.logprobs,
            "advantages": [0.0] * prefix + [n - 1.5] * length,
        }
        data.append(types.Datum(types.ModelInput.from_ints(full[:-1]), inputs))
    return data


def logprobs_of(sampler: mint.SamplingClient, datum: types.Datum) -> np.ndarray:
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:])


def test_a_sampling_client_keeps_its_weights_and_is_not_the_base_model(service: mint.ServiceClient) -> None:
    trainer = new_trainer(service)
    datum = sft_datum(trainer)
    base = logprobs_of(service.create_sampling_client(base_model="mint/tiny"), datum)
    before = trainer.save_weights_and_get_sampling_client()
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = trainer.save_weights_and_get_sampling_client(name="after")
    np.testing.assert_allclose(logprobs_of(before, datum), base, atol=1e-5)
    assert np.abs(logprobs_of(after, datum) - base).max() > 1e-2
    trained = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(logprobs_of(after, datum), trained, atol=1e-5)


def test_two_calls_and_one_step_equal_one_call_with_both_lists(service: mint.ServiceClient) -> None:
    outcomes = []
    for split in (True, False):
        trainer = new_trainer(service)
        data = [sft_datum(trainer), sft_datum(trainer, "Q: What is 3 + 4?\nA:", " 7")]
        for part in [data[:1], data[1:]] if split else [data]:
            trainer.forward_backward(part, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        outcomes.append(trainer.forward(data, "cross_entropy").result())
    for one, other in zip(outcomes[0].loss_fn_outputs, outcomes[1].loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5)


def test_a_step_without_gradients_moves_nothing_and_says_so(service: mint.ServiceClient) -> None:
    trainer = new_trainer(service)
    datum = sft_datum(trainer)
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    before = trainer.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    assert trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["optim/skipped"] == 1
    assert trainer.forward([datum], "cross_entropy").result().metrics["loss:sum"] == before


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.2])
def test_at_fixed_weights_the_importance_ratio_is_one_at_any_temperature(
    service: mint.ServiceClient, temperature: float
) -> None:
    trainer = new_trainer(service)
    trainer.forward_backward([sft_datum(trainer)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    data = rl_datums(trainer, trainer.save_weights_and_get_sampling_client(), temperature)
    metrics = trainer.forward(data, "importance_sampling").result().metrics
    assert metrics["ratio:mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio:max"] == pytest.approx(1, abs=1e-4)


def test_a_custom_loss_makes_the_same_update_as_the_equal_built_in(service: mint.ServiceClient) -> None:
    import torch

    def importance_sampling(data, logprobs):
        loss = torch.zeros(())
        for datum, p in zip(data, logprobs, strict=True):
            inputs = {key: tensor.to_torch() for key, tensor in datum.loss_fn_inputs.items()}
            ratio = torch.exp(p - inputs["logprobs"])
            loss = loss - (inputs["weights"] * ratio * inputs["advantages"]).sum()
        return loss, {"mine:sum": float(loss.detach())}

    results = []
    for custom in (True, False):
        trainer = new_trainer(service)
        data = rl_datums(trainer, trainer.save_weights_and_get_sampling_client())
        if custom:
            output = trainer.forward_backward_custom(data, importance_sampling).result()
        else:
            output = trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        results.append((output.metrics["loss:sum"], trainer.forward(data, "importance_sampling").result()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-4)
    for one, other in zip(results[0][1].loss_fn_outputs, results[1][1].loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-4)


def test_reverse_kl_distils_a_teacher_who_is_told_more(service: mint.ServiceClient) -> None:
    """The student reads the question alone and comes to answer like the teacher, who was trained to obey a hint."""
    teacher, student = new_trainer(service, seed=1), new_trainer(service, seed=2)
    hinted, plain = sft_datum(teacher, "(say 41) " + PROMPT, " 41"), sft_datum(teacher, PROMPT, " 41")
    for _ in range(2):
        teacher.forward_backward([hinted], "cross_entropy")
        teacher.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    path = teacher.save_weights_for_sampler("teacher").result().path

    def datum(weight: float = 1.0) -> types.ReverseKLDatum:
        targets, weights = plain.loss_fn_inputs["target_tokens"], plain.loss_fn_inputs["weights"].to_numpy() * weight
        return types.ReverseKLDatum(plain.model_input, hinted.model_input, targets, weights)

    def kl(reference: str = path, **options: float) -> types.ForwardBackwardOutput:
        return student.forward_backward_reverse_kl([datum()], reference, **options).result()

    first, other = kl(), student.forward_backward_reverse_kl([datum(-2.0)], path).result()
    assert other.metrics["loss:sum"] == pytest.approx(-2 * first.metrics["loss:sum"], rel=1e-5)
    assert kl("mint/tiny").metrics["kl:mean"] < first.metrics["kl:mean"] != kl(temperature=2.0).metrics["kl:mean"]
    student.load_state(student.save_state("new").result().path).result()  # drops those gradients
    for _ in range(20):
        student.forward_backward_reverse_kl([datum()], path)
        student.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    last = kl()
    assert last.metrics["kl:mean"] < 0.6 * first.metrics["kl:mean"]
    losses = last.loss_fn_outputs[0]["loss"].to_numpy()
    assert len(losses) == plain.model_input.length
    assert losses.sum() == pytest.approx(last.metrics["loss:sum"], rel=1e-4)


def test_a_resumed_run_takes_the_step_the_unbroken_one_takes(service: mint.ServiceClient) -> None:
    trainer = new_trainer(service)
    datum = sft_datum(trainer)
    params = types.AdamParams(learning_rate=1e-3)
    for _ in range(2):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(params)
    path = trainer.save_state("middle").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    fresh = service.create_training_client_from_state(path)
    losses = []
    for client in (trainer, resumed, fresh):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(params).result()
        losses.append(client.forward([datum], "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == losses[1]
    assert losses[2] != losses[0]


def test_tenants_of_different_ranks_do_not_disturb_each_other(service: mint.ServiceClient) -> None:
    def train(client: mint.TrainingClient) -> float:
        datum = sft_datum(client)
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3))
        return client.forward([datum], "cross_entropy").result().metrics["loss:sum"]

    def create() -> list[mint.TrainingClient]:
        shapes = [(1, True), (8, False), (64, True)]
        return [service.create_lora_training_client("mint/tiny", rank=r, seed=1, train_mlp=m) for r, m in shapes]

    alone = [train(client) for client in create()]
    together = create()
    datum = sft_datum(together[0])
    for _ in range(3):
        for client in together:
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3))
    losses = [client.forward([datum], "cross_entropy").result().metrics["loss:sum"] for client in together]
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert len(set(alone)) == 3


def test_a_seed_reproduces_its_samples_and_its_samples_differ(service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode(PROMPT))
    params = types.SamplingParams(max_tokens=24, temperature=1.5, seed=11, stop=[])
    first = [s.tokens for s in sampler.sample(prompt, 16, params).result().sequences]
    others = [sampler.sample(prompt, 5, types.SamplingParams(max_tokens=8)) for _ in range(4)]
    again = [s.tokens for s in sampler.sample(prompt, 16, params).result().sequences]
    for future in others:
        future.result()
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 16


def test_sampling_stops_where_it_is_told(service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    tokenizer = sampler.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode(PROMPT))

    def draw(**given: object) -> types.SampledSequence:
        params = types.SamplingParams(temperature=0.0, **given)  # type: ignore[arg-type]
        return sampler.sample(prompt, 1, params).result().sequences[0]

    plain = draw(max_tokens=12)
    assert plain.stop_reason == "stop"
    assert plain.tokens[-1] == tokenizer.eos_token_id
    assert len(plain.logprobs or []) == len(plain.tokens)
    assert draw(max_tokens=12, stop_token_ids=[plain.tokens[1]]).tokens == plain.tokens[:2]
    assert draw(max_tokens=12, stop=tokenizer.decode(plain.tokens[:2])).tokens == plain.tokens[:2]
    endless = draw(max_tokens=12, stop=[])
    assert (endless.stop_reason, len(endless.tokens)) == ("length", 12)
    assert draw(max_tokens=1).stop_reason == "length"


NASTY = {
    "unequal lengths": ({"weights": [1.0]}, "weights has length 1"),
    "a token beyond the vocabulary": ({"target_tokens": "beyond"}, "token id 1000000 at position 0"),
    "an advantage that is not a number": ({"advantages": math.nan}, "advantages holds nan at position"),
    "an unknown input": ({"reward": 1.0}, "does not read loss_fn_inputs\\['reward'\\]"),
}


@pytest.mark.parametrize("fault", list(NASTY))
def test_a_bad_datum_costs_its_sender_one_clear_message(service: mint.ServiceClient, fault: str) -> None:
    trainer = new_trainer(service)
    good = rl_datums(trainer, trainer.save_weights_and_get_sampling_client())[0]
    (key, value), message = next(iter(NASTY[fault][0].items())), NASTY[fault][1]
    length = good.model_input.length
    given = [10**6] * length if value == "beyond" else value if isinstance(value, list) else [value] * length
    bad = types.Datum(good.model_input, {**good.loss_fn_inputs, key: given})
    with pytest.raises(mint.BadRequest, match=message):
        trainer.forward_backward([good, bad], "importance_sampling").result()
    assert trainer.forward_backward([good], "importance_sampling").result().metrics["loss:sum"] != 0
    assert trainer.optim_step(types.AdamParams()).result().metrics["optim/skipped"] == 0


def test_a_bad_sample_request_costs_its_sender_one_clear_message(service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode(PROMPT))
    faults = [
        (types.ModelInput.from_ints([]), {"max_tokens": 4}, "prompt is empty"),
        (types.ModelInput.from_ints([10**6]), {"max_tokens": 4}, "token id 1000000 at position 0"),
        (prompt, {"max_tokens": 10**6}, "exceed the context"),
    ]
    for given, params, message in faults:
        with pytest.raises(mint.BadRequest, match=message):
            sampler.sample(given, 1, types.SamplingParams(**params)).result()  # type: ignore[arg-type]
    assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result().sequences[0].tokens


def test_an_unknown_model_is_named_with_what_to_do(service: mint.ServiceClient, tmp_path: Path) -> None:
    with pytest.raises(mint.BadRequest, match="`mint/tiny` is bundled"):
        service.create_lora_training_client(str(tmp_path / "nothing-here"), rank=8)


def test_calls_pipeline_and_answer_in_order(service: mint.ServiceClient) -> None:
    trainer = new_trainer(service)
    datum = sft_datum(trainer)
    futures = []
    for _ in range(5):
        futures.append(trainer.forward_backward([datum], "cross_entropy"))
        trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    losses = [future.result().metrics["loss:sum"] for future in futures]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_runs_and_checkpoints_are_listed_and_deleted(service: mint.ServiceClient) -> None:
    trainer = new_trainer(service)
    state = trainer.save_state("one").result().path
    sampler_path = trainer.save_weights_for_sampler("one").result().path
    assert sampler_path is not None
    rest = service.create_rest_client()
    run = types.ParsedCheckpointTinkerPath.from_tinker_path(state).training_run_id
    listed = {c.tinker_path for c in rest.list_checkpoints(run).result().checkpoints}
    assert listed == {state, sampler_path}
    rest.delete_checkpoint_from_tinker_path(sampler_path).result()
    assert {c.tinker_path for c in rest.list_checkpoints(run).result().checkpoints} == {state}
    with pytest.raises(mint.NotFound):
        client = service.create_sampling_client(model_path=sampler_path)
        client.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
