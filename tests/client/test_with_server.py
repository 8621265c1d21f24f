"""The clients against the real server: everything they can ask is understood, and what comes back is what was meant."""

import asyncio
import pickle
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import pytest

import mint
from mint import types
from tests.server.live import Live

DATA = [
    types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]}),
    types.Datum(types.ModelInput.from_ints([5]), {"target_tokens": [6], "weights": [1.0]}),
]
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)


@pytest.fixture
def service(live: Live) -> Iterator[mint.ServiceClient]:
    client = mint.ServiceClient(live.url, "k", user_metadata={"who": "me"})
    yield client
    client.close().result()


@pytest.fixture
def training(service: mint.ServiceClient) -> mint.TrainingClient:
    return service.create_lora_training_client(
        "mint/tiny", rank=8, seed=1, train_unembed=False, user_metadata={"a": "b"}
    )


def test_a_training_step_reaches_the_backend_in_order(live: Live, training: mint.TrainingClient) -> None:
    forward_backward = training.forward_backward(DATA, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    output = forward_backward.result()
    assert step.result().metrics == {"step": 1.0}
    assert [o["logprobs"].tolist() for o in output.loss_fn_outputs] == [
        pytest.approx([-0.02, -0.03, -0.04]),
        pytest.approx([-0.06]),
    ]
    assert output.metrics["loss:sum"] == pytest.approx(0.15)
    assert live.backend.names()[-2:] == ["forward_backward", "optim_step"]
    assert live.backend.calls[-1][2] == types.AdamParams(learning_rate=1e-3)
    assert live.backend.calls[-2][2] == DATA


def test_loss_options_arrive(live: Live, training: mint.TrainingClient) -> None:
    datum = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3})
    training.forward([datum], "ppo", {"clip_low_threshold": 0.5}).result()
    assert live.backend.calls[-1][0] == "forward"
    assert live.backend.calls[-1][3:] == ("ppo", {"clip_low_threshold": 0.5})


def test_the_sampler_is_frozen_named_or_not(live: Live, training: mint.TrainingClient) -> None:
    clients = []
    for name in (None, "rl-step-0", "rl-step-0", None):
        clients.append(training.save_weights_and_get_sampling_client(name=name))
        training.optim_step(types.AdamParams()).result()
    logprobs = [c.sample(PROMPT, 2, PARAMS).result().sequences[1].logprobs[0] for c in clients]
    assert logprobs == [-0.5, -1.5, -2.5, -3.5], "each samples from the weights of its own moment"
    assert clients[0].get_base_model() == "mint/tiny"
    assert asyncio.run(clients[1].get_base_model_async()) == "mint/tiny"


def test_a_sample_given_up_while_it_is_held_is_cancelled_in_the_backend(
    live: Live, service: mint.ServiceClient
) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    live.backend.hold()
    future = sampler.sample(PROMPT, 1, PARAMS)
    while "sample" not in live.backend.names():
        time.sleep(0.01)
    assert future.cancel()
    deadline = time.monotonic() + 10
    while not live.backend.cancelled("sample") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live.backend.cancelled("sample") == 1
    assert live.backend.names().count("sample") == 1, "asking for its id does not sample again"


STEERING = {
    "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5, "logit_bias": {3: -100.0, 4: 2.5},
    "json_schema": {"type": "object", "properties": {"a": {"const": None}}},
}  # fmt: skip


def test_every_sampling_option_is_answered(live: Live, service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    result = sampler.sample(
        prompt=PROMPT,
        num_samples=3,
        sampling_params=types.SamplingParams(
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            seed=4,
            stop=["x"],
            stop_token_ids=[7],
            **STEERING,
        ),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=1,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData([[1], [2]], "int64"),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=1,
    ).result()
    (request,) = [call[2] for call in live.backend.calls if call[0] == "sample"]
    assert request.sampling_params == types.SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=4, stop=["x", 7], **STEERING
    )
    assert (request.num_samples, request.prompt_logprobs_last_n) == (3, 1)
    assert len(result.sequences) == len({s.sequence_id for s in result.sequences}) == 3
    assert result.topk_prompt_logprobs is not None
    assert result.sequences[0].topk_logprobs is not None
    assert result.target_prompt_logprobs is not None
    assert result.prompt_alt_tokens is not None
    assert pickle.loads(pickle.dumps(sampler)).compute_logprobs(PROMPT).result() == [
        None,
        pytest.approx(-0.02),
        pytest.approx(-0.03),
    ]


def test_t11_state_is_saved_found_and_loaded_again(
    live: Live, service: mint.ServiceClient, training: mint.TrainingClient
) -> None:
    for _ in range(3):
        training.optim_step(types.AdamParams())
    path = training.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    with pytest.raises(mint.BadRequest, match="exists already"):
        training.save_state("a").result()
    assert training.save_state("a", overwrite=True).result().path == path
    training.optim_step(types.AdamParams()).result()
    training.load_state(path).result()
    assert training.optim_step(types.AdamParams()).result().metrics == {"step": 4.0}

    plain = service.create_training_client_from_state(path)
    whole = asyncio.run(service.create_training_client_from_state_with_optimizer_async(path))
    for client in (plain, whole):
        info = client.get_info()
        assert (info.is_lora, info.lora_rank) == (True, 8)
        assert client.optim_step(types.AdamParams()).result().metrics == {"step": 4.0}
    loads = [call[3] for call in live.backend.calls if call[0] == "load_adapter"]
    assert loads == [False, False, True]
    drawn = live.backend.adapters[plain.model_id]
    assert drawn == types.LoraConfig(rank=8, seed=drawn.seed, train_unembed=False)


def test_checkpoints_outlive_the_server(live: Live, service: mint.ServiceClient, training: mint.TrainingClient) -> None:
    path = training.save_weights_for_sampler("kept").result().path
    live.restart()
    with mint.ServiceClient(live.url, "k") as later:
        assert later.create_sampling_client(model_path=path).sample(PROMPT, 1, PARAMS).result().sequences
        assert later.create_rest_client().get_training_run_by_tinker_path(path).result().lora_rank == 8


@pytest.mark.parametrize("key", ["sk-abc", "tml-abc", "plain"])
def test_keys_of_every_form_are_let_in(tmp_path: Path, key: str) -> None:
    server = Live(tmp_path / "keyed", keys=(key,))
    with mint.ServiceClient(server.url, key) as service:
        assert [m.model_name for m in service.get_server_capabilities().supported_models] == ["mint/tiny"]
        service.create_lora_training_client("mint/tiny")
    with pytest.raises(mint.AuthenticationError, match="MINT_API_KEY"):
        mint.ServiceClient(server.url, "sk-wrong").create_lora_training_client("mint/tiny")
    with pytest.raises(mint.Unauthorized, match="MINT_API_KEY"):
        mint.ServiceClient(server.url).get_server_capabilities()
    server.stop()


# --------------------------------------------------------------------------------------------------------------------
# Mistakes: told at once, and the next request works


def test_mistakes_are_refused_and_the_client_goes_on(
    live: Live, service: mint.ServiceClient, training: mint.TrainingClient
) -> None:
    beyond = types.Datum(types.ModelInput.from_ints([99_999]), {"target_tokens": [1]})
    with pytest.raises(mint.BadRequest, match="99999"):
        training.forward_backward([beyond], "cross_entropy").result()
    with pytest.raises(mint.BadRequest, match="clip_hi"):
        training.forward_backward(DATA, "cross_entropy", {"clip_hi": 2.0}).result()
    with pytest.raises(mint.BadRequest, match="nope"):
        training.forward_backward(DATA, "nope").result()
    with pytest.raises(mint.NotFound, match="no checkpoint"):
        training.load_state("tinker://nobody/weights/x").result()
    with pytest.raises(mint.MintError, match="no/such-model"):
        service.create_lora_training_client("no/such-model")
    sampler = service.create_sampling_client(base_model="mint/tiny")
    with pytest.raises(mint.BadRequest, match="context"):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=10**6)).result()
    training.forward_backward(DATA, "cross_entropy").result()
    assert training.optim_step(types.AdamParams()).result().metrics == {"step": 1.0}
    assert sampler.sample(PROMPT, 1, PARAMS).result().sequences


def test_a_failure_in_the_backend_is_raised_at_result(live: Live, training: mint.TrainingClient) -> None:
    live.backend.fail["forward_backward"] = mint.BadRequest("datum 0 is odd")
    with pytest.raises(mint.BadRequest, match="datum 0 is odd"):
        training.forward_backward(DATA, "cross_entropy").result()
    live.backend.fail["forward_backward"] = mint.Internal("out of memory")
    with pytest.raises(mint.RequestFailedError, match="out of memory") as raised:
        training.forward_backward(DATA, "cross_entropy").result()
    assert raised.value.category == "server"
    live.backend.fail.clear()
    training.forward_backward(DATA, "cross_entropy").result()


def test_a_held_request_is_polled_until_it_is_done(live: Live, training: mint.TrainingClient) -> None:
    live.backend.hold()
    step = training.optim_step(types.AdamParams())
    with pytest.raises(TimeoutError):
        step.result(timeout=2.5)  # longer than this server holds a poll
    live.backend.let_go()
    assert step.result(timeout=10).metrics == {"step": 1.0}


def test_samples_given_up_are_cancelled_in_the_backend(live: Live, service: mint.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="mint/tiny")
    sampler.sample(PROMPT, 1, PARAMS).result()
    live.backend.hold()

    async def hurry() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample_async(PROMPT, 1, PARAMS), 0.3)

    asyncio.run(hurry())
    live.backend.let_go()
    assert sampler.sample(PROMPT, 1, PARAMS).result().sequences


# --------------------------------------------------------------------------------------------------------------------
# RestClient


def test_runs_sessions_and_checkpoints_are_listed_and_looked_after(
    service: mint.ServiceClient, training: mint.TrainingClient
) -> None:
    rest = service.create_rest_client()
    state = training.save_state("a", user_metadata={"k": "v"}).result().path
    sampler = training.save_weights_for_sampler("b", ttl_seconds=7200).result().path

    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora, run.user_metadata) == ("mint/tiny", 8, True, {"a": "b"})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == state
    assert rest.get_training_run_by_tinker_path(sampler).result().training_run_id == training.model_id
    runs = rest.list_training_runs(limit=5).result()
    assert [r.training_run_id for r in runs.training_runs] == [training.model_id]
    assert runs.cursor.total_count == 1

    listed = {c.checkpoint_id: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert set(listed) == {"weights/a", "sampler_weights/b"}
    assert listed["weights/a"].user_metadata == {"k": "v"}
    assert listed["weights/a"].checkpoint_type == "training"
    assert listed["sampler_weights/b"].expires_at is not None
    assert {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints} == {state, sampler}

    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("mint/tiny", 8, False)

    (session_id,) = rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    assert session.training_run_ids == [training.model_id]
    assert session.user_metadata == {"who": "me"}
    client = service.create_sampling_client(model_path=sampler)
    found = rest.get_sampler(rest.get_session(session_id).result().sampler_ids[-1]).result()
    assert (found.base_model, found.model_path) == ("mint/tiny", sampler)
    assert client.sample(PROMPT, 1, PARAMS).result().sequences

    rest.set_checkpoint_ttl_from_tinker_path(sampler, None).result()
    rest.publish_checkpoint_from_tinker_path(sampler).result()
    changed = {c.checkpoint_id: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert (changed["sampler_weights/b"].public, changed["sampler_weights/b"].expires_at) == (True, None)
    rest.unpublish_checkpoint_from_tinker_path(sampler).result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    rest.delete_checkpoint(training.model_id, "weights/a").result()
    assert rest.list_checkpoints(training.model_id).result().checkpoints == []
    with pytest.raises(mint.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(mint.BadRequest, match="tinker://<training run>"):
        rest.delete_checkpoint_from_tinker_path("not a path")


def test_an_archive_link_needs_no_key_and_holds_the_adapter(
    service: mint.ServiceClient, training: mint.TrainingClient
) -> None:
    path = training.save_weights_for_sampler("b").result().path
    rest = service.create_rest_client()
    link = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    assert link.expires > datetime.now(UTC)
    with urllib.request.urlopen(link.url) as download, tarfile.open(fileobj=BytesIO(download.read())) as archive:
        names = [Path(name).name for name in archive.getnames()]
    assert "adapter_config.json" in names
    again = asyncio.run(rest.get_checkpoint_archive_url_async(training.model_id, "sampler_weights/b"))
    assert again.url.startswith("http")


def test_rest_calls_have_awaited_twins(live: Live, training: mint.TrainingClient) -> None:
    async def look() -> types.TrainingRunsResponse:
        rest = mint.RestClient(live.url, "k")
        assert (await rest.get_training_run_async(training.model_id)).training_run_id == training.model_id
        return await rest.list_training_runs_async()

    assert len(asyncio.run(look()).training_runs) == 1


def test_the_tokenizer_of_the_bundled_model_is_found_without_a_network(
    service: mint.ServiceClient, training: mint.TrainingClient
) -> None:
    tokenizer = training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Q: What is 3 + 5?\nA:")) == "Q: What is 3 + 5?\nA:"
    assert tokenizer.eos_token_id is not None
    assert service.create_sampling_client(base_model="mint/tiny").get_tokenizer() is tokenizer


def test_a_tokenizer_that_cannot_be_had_is_a_clear_error(tmp_path: Path) -> None:
    from mint.client.tokenizers import load_tokenizer

    with pytest.raises(mint.NotFound, match="no tokenizer for"):
        load_tokenizer(str(tmp_path))


def test_checkpoints_are_interpolated(live: Live, service: mint.ServiceClient) -> None:
    trainer = service.create_lora_training_client("mint/tiny", rank=8)
    paths = [trainer.save_state("a").result().path, trainer.save_weights_for_sampler("b").result().path]
    rest = service.create_rest_client()
    path = rest.interpolate_checkpoints(paths, [0.5, 1.5], name="mixed").result()
    assert path.endswith("/sampler_weights/mixed")
    ((_, folders, coefficients, _),) = [call for call in live.backend.calls if call[0] == "combine"]
    assert (len(folders), coefficients) == (2, [0.5, 1.5])
    assert (
        service.create_sampling_client(model_path=path).sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result()
    )
    with pytest.raises(mint.BadRequest, match="2 source_paths and 1 coefficients"):
        rest.interpolate_checkpoints(paths, [1.0]).result()
    with pytest.raises(mint.NotFound, match="no checkpoint"):
        rest.interpolate_checkpoints([path.replace("mixed", "gone")], [1.0]).result()
