"""Where scripts written for Tinker or MinT trip over each other's habits: how each trap is settled here."""

import inspect
import re

import pytest

import mint
import mint.tinker
from mint import types, wire
from mint.rl.train import Config

PROMPT = [ord(c) for c in "Q: What is 3 + 5?\nA:"]
ANSWER = [ord(c) for c in " 8"]


def datum(**inputs: list[float]) -> types.Datum:
    full = PROMPT + ANSWER
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(ANSWER)
    given = {"target_tokens": full[1:]} | (inputs or {"weights": weights})
    return types.Datum(types.ModelInput.from_ints(full[:-1]), given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trainer(service: mint.ServiceClient) -> mint.TrainingClient:
    return service.create_lora_training_client("mint/tiny", rank=4, seed=0)


def loss_of(trainer: mint.TrainingClient, *data: types.Datum) -> float:
    return trainer.forward(list(data), "cross_entropy").result().metrics["loss:sum"]


def test_stop_token_ids_are_stops_and_unknown_parameters_are_refused() -> None:
    assert types.SamplingParams(stop_token_ids=[5]).stop == [5]
    assert types.SamplingParams(stop="x", stop_token_ids=[5]).stop == ["x", 5]
    with pytest.raises(TypeError, match="stop_tokens"):
        types.SamplingParams(stop_tokens=[5])  # type: ignore[call-arg]


def test_adam_takes_both_spellings_and_each_surface_keeps_its_defaults() -> None:
    assert types.AdamParams(betas=(0.8, 0.9)) == types.AdamParams(beta1=0.8, beta2=0.9)
    ours, theirs = types.AdamParams(), mint.tinker.AdamParams()
    assert (ours.learning_rate, ours.beta2, ours.eps) == (2e-5, 0.999, 1e-8)
    assert (theirs.learning_rate, theirs.beta2, theirs.eps) == (1e-4, 0.95, 1e-12)


def test_weights_go_by_three_names_which_may_not_differ(trainer: mint.TrainingClient) -> None:
    weights = [0.0] * (len(PROMPT) - 1) + [0.5, 2.0]
    losses = {loss_of(trainer, datum(**{name: weights})) for name in ("weights", "loss_weights", "mask")}
    assert len(losses) == 1
    with pytest.raises(mint.BadRequest, match="weights and mask are the same input"):
        loss_of(trainer, datum(weights=weights, mask=[1.0] * len(weights)))


def test_kl_goes_into_the_advantage_unless_asked_into_the_loss() -> None:
    assert inspect.signature(Config).parameters["kl_mode"].default == "advantage"


def test_each_surface_keeps_its_own_rank_and_temperature() -> None:
    def rank(service: type) -> int:
        return inspect.signature(service.create_lora_training_client).parameters["rank"].default

    assert (rank(mint.ServiceClient), rank(mint.tinker.ServiceClient)) == (16, 32)
    assert inspect.signature(Config).parameters["temperature"].default == 1.0
    assert inspect.signature(Config).parameters["lora_rank"].default == 32


def test_losses_are_sums(trainer: mint.TrainingClient) -> None:
    one = loss_of(trainer, datum())
    logprobs = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert one == pytest.approx(-sum(logprobs[len(PROMPT) - 1 :]), rel=1e-5)
    assert loss_of(trainer, datum(), datum()) == pytest.approx(2 * one, rel=1e-5)


def test_the_server_says_its_clip_ranges(service: mint.ServiceClient) -> None:
    losses = service.get_server_capabilities().loss_fns
    ranges = {name: [losses[name][f"clip_{end}_threshold"] for end in ("low", "high")] for name in ("ppo", "cispo")}
    assert ranges == {"ppo": [0.8, 1.2], "cispo": [0.0, 4.0]}


def test_both_encodings_say_the_same() -> None:
    call = wire.ForwardBackwardCall("m", 3, [datum()], "cross_entropy", {}, forward_only=False)
    body = {"data": [wire.to_json(datum())], "loss_fn": "cross_entropy"}
    as_json = {"forward_backward_input": body, "model_id": "m", "seq_id": 3, "type": "forward_backward"}
    assert wire.forward_backward_from_json(as_json, "forward_backward_input") == call
    assert wire.forward_backward_from_proto(wire.forward_backward_to_proto(call)) == call


def test_cross_entropy_takes_weights_of_any_sign_and_size(trainer: mint.TrainingClient) -> None:
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(ANSWER)
    scaled = loss_of(trainer, datum(weights=[-250.0 * w for w in weights]))
    assert scaled == pytest.approx(-250 * loss_of(trainer, datum()), rel=1e-5)


def test_a_live_client_loads_state_and_another_starts_from_it(service: mint.ServiceClient) -> None:
    trainer = service.create_lora_training_client("mint/tiny", rank=4, seed=0)
    path = trainer.save_state("start").result().path
    before = loss_of(trainer, datum())
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert loss_of(trainer, datum()) != before
    trainer.load_state(path).result()
    assert loss_of(trainer, datum()) == before
    assert loss_of(service.create_training_client_from_state(path), datum()) == before


def test_the_same_prompt_many_times_at_once_is_no_error(service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    prompt = types.ModelInput.from_ints(PROMPT)
    futures = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)) for _ in range(16)]
    assert all(len(future.result().sequences) == 2 for future in futures)


def test_the_log_prob_of_a_greedy_token_is_the_policys_own(service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT + sequence.tokens)).result()
    assert sequence.logprobs == pytest.approx(scored[len(PROMPT) :], abs=1e-5)


def test_the_math_demo_asks_what_it_grades() -> None:
    from demos.rl.adapters.verifiable_math import VerifiableMathAdapter

    class Text:
        def encode(self, text: str) -> str:
            return text

    adapter = VerifiableMathAdapter()
    for sample in adapter.build_dataset()[:20]:
        question = str(adapter.make_prompt(sample, Text()))
        a, b = (int(n) for n in re.findall(r"\d+", question.rpartition("Q:")[2]))
        assert adapter.compute_reward(f" {a + b}", sample) == 1.0
        assert adapter.compute_reward(f" {a + b + 1}", sample) == 0.0
