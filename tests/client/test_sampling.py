"""SamplingClient against a recording server: what is asked, many at once, copies in other processes, faults."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import pickle

import pytest

import mint
from mint import types
from mint.client import sampling
from tests.client.serving import serving
from tests.client.stub import VOCABULARY, Answer, Stub
from tests.waiting import PATIENCE, eventually

PARAMS = types.SamplingParams(max_tokens=4)


def test_sample_returns_the_sequences_with_their_ids(sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    result = sampler.sample(prompt=prompt, num_samples=3, sampling_params=PARAMS).result()
    assert [s.sequence_id for s in result.sequences] == ["0-0", "0-1", "0-2"]
    assert result.sequences[0] == types.SampledSequence([0], [-1.0], "length", sequence_id="0-0")


def test_t1_the_stop_tokens_reach_the_wire(stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    params = types.SamplingParams(max_tokens=16, temperature=0.8, stop_token_ids=[2])
    sampler.sample(prompt=prompt, num_samples=8, sampling_params=params).result()
    (said,) = stub.said("asample")
    assert said == {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "num_samples": 8,
        "sampling_params": {"max_tokens": 16, "stop": [2], "temperature": 0.8, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "type": "sample",
    }


def test_the_async_twin_returns_the_response_itself(sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    result = asyncio.run(sampler.sample_async(prompt, 2, PARAMS))
    assert isinstance(result, types.SampleResponse)
    assert len(result.sequences) == 2


def test_compute_logprobs_scores_the_prompt(stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    assert sampler.compute_logprobs(prompt).result() == [None, -2.0, -3.0]
    assert asyncio.run(sampler.compute_logprobs_async(prompt)) == [None, -2.0, -3.0]
    said = stub.said("asample")[0]
    assert said["prompt_logprobs"] is True
    assert said["sampling_params"]["max_tokens"] == 1


def test_a_thousand_samples_at_once(stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    futures = [sampler.sample(prompt, 1, PARAMS) for _ in range(1000)]
    tokens = [f.result(timeout=PATIENCE).sequences[0].tokens[0] for f in futures]
    assert sorted(said["seq_id"] for said in stub.said("asample")) == list(range(1000))
    assert sorted(tokens) == sorted(n % VOCABULARY for n in range(1000))
    assert stub.most_polls_open <= 256


def test_t11_the_same_prompt_many_times_at_once_is_no_error(
    sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    async def together() -> list[types.SampleResponse]:
        return await asyncio.gather(*(sampler.sample_async(prompt, 1, PARAMS) for _ in range(20)))

    assert len({r.sequences[0].sequence_id for r in asyncio.run(together())}) == 20


def test_in_flight_samples_keep_to_the_servers_limit(stub: Stub, prompt: types.ModelInput) -> None:
    stub.settings = {"sample_max_concurrent_requests": 3}
    with serving(stub) as url, mint.ServiceClient(url) as service:
        sampler = service.create_sampling_client(base_model="base")
        stub.let_go.clear()
        futures = [sampler.sample(prompt, 1, PARAMS) for _ in range(12)]
        eventually(lambda: stub.polls_open >= 3)
        service.create_sampling_client(base_model="base")  # whatever was sent before it has arrived
        assert len(stub.said("asample")) == stub.polls_open == 3
        stub.let_go.set()
        for future in futures:
            future.result()
    assert stub.most_polls_open == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, 2], 1, PARAMS), "ModelInput.from_ints"),
        (("text", 1, PARAMS), "encode"),
        ((types.ModelInput.empty(), 1, PARAMS), "empty"),
        ((types.ModelInput.from_ints([1]), 0, PARAMS), "num_samples"),
        ((types.ModelInput.from_ints([1]), True, PARAMS), "num_samples"),
        ((types.ModelInput.from_ints([1]), 1, {"max_tokens": 3}), "SamplingParams"),
        ((types.ModelInput.from_ints([-1]), 1, PARAMS), "-1"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_sent(
    stub: Stub, sampler: mint.SamplingClient, arguments: tuple, says: str
) -> None:
    with pytest.raises(mint.BadRequest, match=says):
        sampler.sample(*arguments)
    assert "asample" not in stub.paths()


def test_a_server_that_drops_what_was_asked_for_is_found_out(
    sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    with pytest.raises(mint.Internal, match="ignored topk_prompt_logprobs, prompt_alt_tokens_k"):
        sampler.sample(prompt, 1, PARAMS, topk_prompt_logprobs=2, prompt_alt_tokens_k=1).result()


# --------------------------------------------------------------------------------------------------------------------
# Faults


def test_backpressure_is_waited_out(stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput) -> None:
    stub.faults["asample"].extend(Answer({"detail": "full"}, 429, {"retry-after-ms": "10"}) for _ in range(3))
    assert sampler.sample(prompt, 1, PARAMS).result(timeout=PATIENCE).sequences
    said = [r for r in stub.received if r.path == "asample"]
    assert [r.json["seq_id"] for r in said] == [0, 0, 0, 0]
    assert {r.headers["x-tinker-sampling-backpressure"] for r in said} == {"1"}


def test_a_lost_sample_is_asked_for_again_under_a_new_number(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    stub.faults["retrieve_future"].append(Answer({}, 410))
    assert sampler.sample(prompt, 1, PARAMS).result().sequences[0].tokens == [1]
    assert [said["seq_id"] for said in stub.said("asample")] == [0, 1]


def test_a_sample_that_is_lost_again_and_again_fails(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "RESUBMISSIONS", 1)
    stub.faults["retrieve_future"].extend([Answer({}, 410), Answer({}, 410)])
    with pytest.raises(mint.Internal, match="no longer knows"):
        sampler.sample(prompt, 1, PARAMS).result()


def test_giving_up_a_sample_tells_the_server(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    stub.let_go.clear()
    future = sampler.sample(prompt, 1, PARAMS)
    eventually(lambda: stub.polls_open)
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert eventually(lambda: stub.said("cancel_future")) == [{"request_id": list(stub.results)[-1]}]
    stub.let_go.set()


def test_exactly_one_of_path_and_model(service: mint.ServiceClient) -> None:
    for given in ({}, {"model_path": "tinker://r/sampler_weights/a", "base_model": "base"}):
        with pytest.raises(mint.BadRequest, match="either model_path"):
            service.create_sampling_client(**given)


# --------------------------------------------------------------------------------------------------------------------
# Copies


def test_a_pickled_copy_samples_under_numbers_of_its_own(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]
    for client in [sampler, *copies, *copies]:
        client.sample(prompt, 1, PARAMS).result()
    seq_ids = [said["seq_id"] for said in stub.said("asample")]
    assert len(set(seq_ids)) == 7
    assert len({seq_id // 10**9 for seq_id in seq_ids}) == 4
    assert {said["sampling_session_id"] for said in stub.said("asample")} == {"s:sample:0"}
    assert {r.headers["x-api-key"] for r in stub.received} == {"key"}
    assert stub.paths().count("client/config") == 2, "all copies of a process share one connection"


def test_a_copy_asks_the_server_for_its_number_where_that_is_wanted(stub: Stub, prompt: types.ModelInput) -> None:
    stub.settings = {"sample_join_sampling_session": True}
    with serving(stub) as url, mint.ServiceClient(url) as service:
        copy = pickle.loads(pickle.dumps(service.create_sampling_client(base_model="base")))
        for future in [copy.sample(prompt, 1, PARAMS) for _ in range(5)]:
            future.result()
    assert stub.said("join_sampling_session") == [
        {"sampling_session_id": "s:sample:0", "type": "join_sampling_session"}
    ]
    assert sorted(said["seq_id"] for said in stub.said("asample")) == [7 * 10**9 + n for n in range(5)]


def _sample_elsewhere(client: mint.SamplingClient) -> list[int]:
    return client.sample(types.ModelInput.from_ints([1]), 1, PARAMS).result(timeout=PATIENCE).sequences[0].tokens


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_sample_too(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput, method: str
) -> None:
    sampler.sample(prompt, 1, PARAMS).result()
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        assert pool.submit(_sample_elsewhere, sampler).result(timeout=PATIENCE)
    first, second = (said["seq_id"] for said in stub.said("asample"))
    assert first == 0
    assert second >= 10**9


def test_a_forked_process_may_go_on_with_the_client_it_inherits(
    stub: Stub, sampler: mint.SamplingClient, prompt: types.ModelInput
) -> None:
    sampler.sample(prompt, 1, PARAMS).result()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if _sample_elsewhere(sampler) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    sampler.sample(prompt, 1, PARAMS).result()
    first, second, third = (said["seq_id"] for said in stub.said("asample"))
    assert (first, third) == (0, 1)
    assert second >= 10**9
