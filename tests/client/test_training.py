"""TrainingClient against a recording server: order, numbers, pieces, losses of one's own, checkpoints."""

import asyncio
import threading
import warnings

import numpy as np
import pytest
import torch

import mint
from mint import types, wire
from tests.client.serving import serving
from tests.client.stub import VOCABULARY, Answer, Stub
from tests.waiting import eventually


def _datum(*tokens: int, **inputs: object) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)} | inputs,
    )


def _calls(stub: Stub) -> list[wire.ForwardBackwardCall]:
    return [wire.forward_backward_from_proto(r.body) for r in stub.received if r.path == "forward_backward"]


def test_creating_a_client_says_what_was_asked_for(stub: Stub, service: mint.ServiceClient) -> None:
    service.create_lora_training_client("base", rank=4, seed=7, train_mlp=False, user_metadata={"a": "b"})
    (said,) = stub.said("create_model")
    assert said == {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "base",
        "lora_config": {"rank": 4, "seed": 7, "train_unembed": True, "train_mlp": False, "train_attn": True},
        "user_metadata": {"a": "b"},
        "type": "create_model",
    }
    service.create_lora_training_client("base")
    assert stub.said("create_model")[1]["model_seq_id"] == 1
    assert stub.said("create_model")[1]["lora_config"]["rank"] == 16


def test_t5_the_tinker_surface_asks_for_rank_32(stub: Stub) -> None:
    with serving(stub) as url, mint.tinker.ServiceClient(base_url=url) as service:
        service.create_lora_training_client("base")
    assert stub.said("create_model")[0]["lora_config"]["rank"] == 32


def test_calls_pipeline_in_the_order_they_are_made(stub: Stub, training: mint.TrainingClient) -> None:
    stub.let_go.clear()
    futures = []
    for _ in range(5):
        futures.append(training.forward_backward([_datum(1, 2, 3)], "cross_entropy"))
        futures.append(training.optim_step(types.AdamParams()))
    eventually(lambda: stub.polls_open == 10)  # results are waited for together
    assert not any(future.done() for future in futures)
    stub.let_go.set()
    for future in futures:
        future.result()
    posts = [r for r in stub.received if r.path in ("forward_backward", "optim_step")]
    assert [r.path for r in posts] == ["forward_backward", "optim_step"] * 5
    seq_ids = [
        wire.forward_backward_from_proto(r.body).seq_id if "forward" in r.path else r.json["seq_id"] for r in posts
    ]
    assert seq_ids == list(range(1, 11))


def test_calls_from_several_threads_are_sent_in_the_order_of_their_numbers(
    stub: Stub, training: mint.TrainingClient
) -> None:
    threads = [
        threading.Thread(target=lambda: [training.optim_step(types.AdamParams()).result() for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [said["seq_id"] for said in stub.said("optim_step")] == list(range(1, 41))


def test_async_calls_submit_when_awaited_and_their_futures_give_the_results(
    stub: Stub, training: mint.TrainingClient
) -> None:
    async def step() -> tuple[types.ForwardBackwardOutput, types.OptimStepResponse]:
        forward_backward = await training.forward_backward_async([_datum(1, 2)], "cross_entropy")
        optim = await training.optim_step_async(types.AdamParams())
        return await forward_backward, await optim.result_async()

    output, step_response = asyncio.run(step())
    assert len(output.loss_fn_outputs) == 1
    assert step_response == types.OptimStepResponse({})


def test_t2_every_adam_field_is_sent_so_no_servers_default_applies(stub: Stub, training: mint.TrainingClient) -> None:
    training.optim_step(types.AdamParams(learning_rate=1e-3, betas=(0.8, 0.9))).result()
    assert stub.said("optim_step") == [
        {
            "model_id": "s:train:0",
            "seq_id": 1,
            "adam_params": {
                "learning_rate": 1e-3,
                "beta1": 0.8,
                "beta2": 0.9,
                "eps": 1e-8,
                "weight_decay": 0.0,
                "grad_clip_norm": 0.0,
            },
            "type": "optim_step",
        }
    ]


def test_t9_data_goes_out_as_protobuf(stub: Stub, training: mint.TrainingClient) -> None:
    training.forward([_datum(1, 2, 3)], "cross_entropy").result()
    (call,) = _calls(stub)
    (request,) = [r for r in stub.received if r.path == "forward_backward"]
    assert request.headers["content-type"] == "application/x-protobuf"
    assert call == wire.ForwardBackwardCall("s:train:0", 1, [_datum(1, 2, 3)], "cross_entropy", {}, True)


def test_t9_data_is_compressed_when_the_server_asks(stub: Stub) -> None:
    stub.settings = {"proto_compress_fwdbwd": True}
    with serving(stub) as url, mint.ServiceClient(url) as service:
        training = service.create_lora_training_client("base")
        training.forward_backward([_datum(1, 2, 3)] * 50, "cross_entropy").result()
    (request,) = [r for r in stub.received if r.path == "forward_backward"]
    assert request.headers["content-encoding"] == "zstd"
    assert len(request.body) < 1000


def test_t9_json_results_of_older_servers_are_understood(stub: Stub, training: mint.TrainingClient) -> None:
    output = {
        "loss_fn_output_type": "TensorDict",
        "loss_fn_outputs": [{"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 3.0},
    }
    stub.faults["retrieve_future"].append(Answer(output))
    result = training.forward([_datum(1, 2, 3)], "cross_entropy").result()
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0, -2.0]
    assert result.metrics == {"loss:sum": 3.0}


def test_a_big_batch_goes_in_numbered_pieces_and_comes_back_whole(stub: Stub) -> None:
    stub.settings = {"fwdbwd_max_chunk_len": 2}
    data = [_datum(n % VOCABULARY, (n + 1) % VOCABULARY, (n + 2) % VOCABULARY) for n in range(5)]
    with serving(stub) as url, mint.ServiceClient(url) as service:
        training = service.create_lora_training_client("base")
        pieces = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams())
        combined = pieces.result()
        step.result()
    assert [(call.seq_id, len(call.data)) for call in _calls(stub)] == [(1, 2), (2, 2), (3, 1)]
    assert stub.said("optim_step")[0]["seq_id"] == 4

    whole = Stub()
    with serving(whole) as url, mint.ServiceClient(url) as service:
        expected = service.create_lora_training_client("base").forward_backward(data, "cross_entropy").result()
    assert combined.loss_fn_outputs == expected.loss_fn_outputs
    assert combined.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"])
    assert combined.metrics["datums:mean"] == pytest.approx((2 * 2 + 2 * 2 + 1 * 1) / 5)
    np.testing.assert_allclose(stub.gradient, whole.gradient)


# --------------------------------------------------------------------------------------------------------------------
# Failures


def test_a_refused_post_raises_at_result_and_the_next_call_works(stub: Stub, training: mint.TrainingClient) -> None:
    stub.faults["optim_step"].append(Answer({"detail": "no such thing"}, 400))
    refused, fine = training.optim_step(types.AdamParams()), training.optim_step(types.AdamParams())
    with pytest.raises(mint.BadRequest, match="no such thing"):
        refused.result()
    fine.result()
    assert [said["seq_id"] for said in stub.said("optim_step")] == [1, 2]


@pytest.mark.parametrize(
    ("category", "kind"), [("user", mint.BadRequest), ("server", mint.RequestFailed), ("else", mint.RequestFailed)]
)
def test_a_failure_while_running_raises_at_result_with_its_category(
    stub: Stub, training: mint.TrainingClient, category: str, kind: type[Exception]
) -> None:
    stub.faults["retrieve_future"].append(Answer({"error": "it broke", "category": category}))
    with pytest.raises(kind, match="it broke") as raised:
        training.optim_step(types.AdamParams()).result()
    assert isinstance(raised.value, mint.RequestFailed)
    assert raised.value.category == category
    training.optim_step(types.AdamParams()).result()


def test_a_lost_result_is_reported_not_repeated(stub: Stub, training: mint.TrainingClient) -> None:
    stub.faults["retrieve_future"].append(Answer({}, 410))
    with pytest.raises(mint.Internal, match="restarted"):
        training.optim_step(types.AdamParams()).result()
    assert len(stub.said("optim_step")) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_datum(1, 2), "list"),
        ([], "empty"),
        ([{"model_input": [1]}], "types.Datum"),
        ([types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], "weights": [1.0]})], "datum 0"),
        ([_datum(1, 2), types.Datum(types.ModelInput.from_ints([1]), {"weights": [1.0]})], "datum 1.*target_tokens"),
        ([_datum(1, 2, weights=[float("nan")])], "finite"),
        ([_datum(1, 2, weigths=[1.0])], "weigths"),
        ([types.Datum(types.ModelInput.from_ints([2**40]), {"target_tokens": [1]})], "1099511627776"),
    ],
)
def test_bad_data_is_refused_before_anything_is_sent(
    stub: Stub, training: mint.TrainingClient, data: object, says: str
) -> None:
    with pytest.raises(mint.BadRequest, match=says):
        training.forward_backward(data, "cross_entropy")
    assert "forward_backward" not in stub.paths()


def test_t3_two_names_of_the_weights_that_differ_are_refused(training: mint.TrainingClient) -> None:
    with pytest.raises(mint.BadRequest, match="weights and mask"):
        training.forward_backward([_datum(1, 2, mask=[0.0])], "cross_entropy")
    training.forward_backward([_datum(1, 2, mask=[1.0], loss_weights=[1.0])], "cross_entropy").result()


def test_a_loss_this_client_does_not_know_is_the_servers_to_judge(stub: Stub, training: mint.TrainingClient) -> None:
    stub.faults["forward_backward"].append(Answer({"detail": "unknown loss_fn 'novel'"}, 400))
    with pytest.raises(mint.BadRequest, match="novel"):
        training.forward_backward([_datum(1, 2)], "novel").result()


def test_unknown_arguments_are_refused_by_name(training: mint.TrainingClient, service: mint.ServiceClient) -> None:
    with pytest.raises(TypeError, match="loss_function"):
        training.forward_backward([_datum(1, 2)], loss_function="ppo")
    with pytest.raises(TypeError, match="lora_rank"):
        service.create_lora_training_client("base", lora_rank=3)


# --------------------------------------------------------------------------------------------------------------------
# Log-probs that are all zero


def _policy_datum(logprobs: list[float], advantages: list[float]) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "logprobs": logprobs, "advantages": advantages},
    )


def test_placeholder_logprobs_still_run_but_warn_once(training: mint.TrainingClient) -> None:
    data = [_policy_datum([-0.5, 0.0, 0.0], [0.0, 1.0, 1.0]), _policy_datum([0.0] * 3, [0.0, -1.0, -1.0])]
    with pytest.warns(UserWarning, match="exactly 0.0") as seen:
        training.forward_backward(data, "importance_sampling").result()
        training.forward_backward(data, "importance_sampling").result()
    assert len(seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.parametrize("logprobs", [[0.0, -0.1, 0.0], [0.0, 0.0, -3.0]])
def test_real_logprobs_do_not_warn(training: mint.TrainingClient, logprobs: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.forward_backward([_policy_datum(logprobs, [0.0, 1.0, 1.0])], "importance_sampling").result()
        training.forward_backward([_policy_datum([0.0] * 3, [0.0] * 3)], "importance_sampling").result()


# --------------------------------------------------------------------------------------------------------------------
# A loss of one's own


def _policy_batch() -> list[types.Datum]:
    random = np.random.default_rng(1)
    return [
        types.Datum(
            types.ModelInput.from_ints(random.integers(VOCABULARY, size=n)),
            {
                "target_tokens": random.integers(VOCABULARY, size=n),
                "logprobs": -random.random(n),
                "advantages": random.normal(size=n),
            },
        )
        for n in (1, 4, 7)
    ]


def _importance_sampling(
    data: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.zeros(())
    for datum, logprob in zip(data, logprobs, strict=True):
        old, advantage = (datum.loss_fn_inputs[key].to_torch() for key in ("logprobs", "advantages"))
        loss = loss - ((logprob - old).exp() * advantage).sum()
    return loss, {"tokens:sum": float(sum(map(len, logprobs)))}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_t10_a_custom_loss_gives_the_gradient_of_the_built_in_one(asynchronous: bool) -> None:
    data = _policy_batch()
    built_in, custom = Stub(), Stub(fwdbwd_max_chunk_len=2)
    with serving(built_in) as url, mint.ServiceClient(url) as service:
        expected = service.create_lora_training_client("base").forward_backward(data, "importance_sampling").result()
    with serving(custom) as url, mint.ServiceClient(url) as service:
        training = service.create_lora_training_client("base")
        if asynchronous:

            async def step() -> types.ForwardBackwardOutput:
                return await (await training.forward_backward_custom_async(data, _importance_sampling))

            output = asyncio.run(step())
        else:
            output = training.forward_backward_custom(data, _importance_sampling).result()
    np.testing.assert_allclose(custom.gradient, built_in.gradient, rtol=1e-5, atol=1e-6)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert output.metrics["tokens:sum"] == 12
    assert "surrogate_loss:sum" in output.metrics
    assert output.loss_fn_outputs == expected.loss_fn_outputs


def test_t10_the_traffic_is_a_forward_then_cross_entropy_with_any_weights(
    stub: Stub, training: mint.TrainingClient
) -> None:
    data = [_datum(1, 2, 3, 4, teacher=[0.25, 0.5, 0.25])]

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (torch.tensor([3.0, -20.0, 0.0]) * logprobs[0]).sum(), {}

    training.forward_backward_custom(data, loss).result()
    training.optim_step(types.AdamParams()).result()
    forward, backward = _calls(stub)
    assert (forward.forward_only, backward.forward_only) == (True, False)
    assert (forward.loss_fn, backward.loss_fn) == ("cross_entropy", "cross_entropy")
    assert forward.data[0].loss_fn_inputs == _datum(1, 2, 3, 4).loss_fn_inputs
    assert backward.data[0].loss_fn_inputs["weights"].tolist() == [-3.0, 20.0, 0.0]
    assert set(backward.data[0].loss_fn_inputs) == {"target_tokens", "weights"}
    assert stub.said("optim_step")[0]["seq_id"] == 3


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda data, logprobs: logprobs[0].sum(), r"\(loss, metrics\)"),
        (lambda data, logprobs: (torch.zeros(()), {}), "does not depend"),
        (lambda data, logprobs: (logprobs[0].detach().sum(), {}), "does not depend"),
    ],
)
def test_a_custom_loss_without_a_gradient_is_refused(training: mint.TrainingClient, loss: object, says: str) -> None:
    with pytest.raises(mint.BadRequest, match=says):
        training.forward_backward_custom([_datum(1, 2)], loss)
    training.forward_backward([_datum(1, 2)], "cross_entropy").result()


def test_an_exception_in_a_custom_loss_is_the_users_own(training: mint.TrainingClient) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        training.forward_backward_custom([_datum(1, 2)], loss)


def test_data_the_custom_loss_leaves_out_gets_zero_weights(stub: Stub, training: mint.TrainingClient) -> None:
    training.forward_backward_custom(
        [_datum(1, 2), _datum(3, 4)], lambda data, logprobs: (logprobs[1].sum(), {})
    ).result()
    assert [d.loss_fn_inputs["weights"].tolist() for d in _calls(stub)[1].data] == [[0.0], [-1.0]]


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_saving_and_loading_say_what_was_asked_for(stub: Stub, training: mint.TrainingClient) -> None:
    saved = training.save_state("a", ttl_seconds=3600, overwrite=True, user_metadata={"k": "v"}).result()
    assert saved.path == "tinker://s:train:0/weights/a"
    training.load_state(saved.path).result()
    training.load_state_with_optimizer(saved.path).result()
    assert training.save_weights_for_sampler("b").result().path == "tinker://s:train:0/sampler_weights/b"
    (save,), loads, (sampler,) = (stub.said(p) for p in ("save_weights", "load_weights", "save_weights_for_sampler"))
    assert save == {
        "model_id": "s:train:0", "seq_id": 1, "path": "a", "ttl_seconds": 3600, "overwrite": True,
        "user_metadata": {"k": "v"}, "type": "save_weights",
    }  # fmt: skip
    assert [(load["seq_id"], load["optimizer"]) for load in loads] == [(2, False), (3, True)]
    assert sampler == {"model_id": "s:train:0", "seq_id": 4, "path": "b", "type": "save_weights_for_sampler"}


@pytest.mark.parametrize("optimizer", [False, True])
def test_t11_a_client_from_state_takes_its_shape_from_the_checkpoint(
    stub: Stub, service: mint.ServiceClient, optimizer: bool
) -> None:
    suffix = "_with_optimizer" if optimizer else ""
    create = getattr(service, f"create_training_client_from_state{suffix}")
    training = create("tinker://r/weights/a", user_metadata={"k": "v"})
    (made,), (loaded,) = stub.said("create_model"), stub.said("load_weights")
    assert made["base_model"] == "base"
    assert made["lora_config"] == {"rank": 8, "train_unembed": True, "train_mlp": False, "train_attn": True}
    assert made["user_metadata"] == {"k": "v"}
    assert (loaded["path"], loaded["optimizer"], loaded["seq_id"]) == ("tinker://r/weights/a", optimizer, 1)
    training.optim_step(types.AdamParams()).result()
    assert stub.said("optim_step")[0]["seq_id"] == 2


def test_t11_load_state_works_on_a_live_client(stub: Stub, training: mint.TrainingClient) -> None:
    training.forward_backward([_datum(1, 2)], "cross_entropy")
    training.load_state("tinker://r/weights/a").result()
    training.optim_step(types.AdamParams()).result()
    assert stub.said("load_weights")[0]["seq_id"] == 2


def test_without_a_name_the_sampler_is_ephemeral(stub: Stub, training: mint.TrainingClient) -> None:
    training.save_weights_and_get_sampling_client()
    asyncio.run(training.save_weights_and_get_sampling_client_async())
    said = stub.said("save_weights_for_sampler")
    assert [s["sampling_session_seq_id"] for s in said] == [0, 1]
    assert not any("path" in s for s in said)
    assert "create_sampling_session" not in stub.paths()


def test_a_name_is_honoured_and_may_be_used_again(stub: Stub, training: mint.TrainingClient) -> None:
    for _ in range(2):
        training.save_weights_and_get_sampling_client(name="rl-step-0")
    first, second = stub.said("save_weights_for_sampler")
    assert first["path"] == second["path"] == "rl-step-0"
    assert "overwrite" not in first
    assert second["overwrite"] is True
    opened = stub.said("create_sampling_session")
    assert [o["model_path"] for o in opened] == ["tinker://s:train:0/sampler_weights/rl-step-0"] * 2
    assert [o["sampling_session_seq_id"] for o in opened] == [0, 1]


def test_the_sampler_is_taken_after_the_calls_before_it(stub: Stub, training: mint.TrainingClient) -> None:
    training.forward_backward([_datum(1, 2)], "cross_entropy")
    training.optim_step(types.AdamParams())
    training.save_weights_and_get_sampling_client()
    assert stub.said("save_weights_for_sampler")[0]["seq_id"] == 3
