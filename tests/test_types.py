"""The vocabulary: what is accepted, under which names, with which defaults, and what is refused."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mint
from mint import tinker, types


def test_model_input_round_trips_token_ids() -> None:
    prompt = types.ModelInput.from_ints(tokens=[5, 7, 9])
    assert prompt.to_ints() == [5, 7, 9]
    assert prompt.length == 3
    assert types.ModelInput.from_ints(np.array([5, 7, 9])) == prompt
    assert prompt.append_int(2).to_ints() == [5, 7, 9, 2]
    assert prompt.append(types.EncodedTextChunk([1, 1])).length == 5
    assert types.ModelInput.empty().to_ints() == []


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4))
def test_model_input_length_is_the_number_of_its_ids(chunks: list[list[int]]) -> None:
    prompt = types.ModelInput([types.EncodedTextChunk(tokens) for tokens in chunks])
    assert prompt.to_ints() == [token for chunk in chunks for token in chunk]
    assert prompt.length == len(prompt.to_ints())


# --------------------------------------------------------------------------------------------------------------------
# Datum and tensors


@pytest.mark.parametrize(
    "targets",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.int32), torch.tensor([1, 2, 3])],
    ids=lambda t: type(t),
)
@pytest.mark.parametrize(
    "weights",
    [[0, 0.5, 1], np.array([0, 0.5, 1]), torch.tensor([0, 0.5, 1], dtype=torch.bfloat16, requires_grad=True)],
    ids=lambda w: type(w),
)
def test_lists_numpy_and_torch_make_the_same_datum(targets: object, weights: object) -> None:
    inputs = types.Datum(
        types.ModelInput.from_ints([9, 1, 2]), {"target_tokens": targets, "weights": weights}
    ).loss_fn_inputs
    assert inputs["target_tokens"] == types.TensorData([1, 2, 3], "int64")
    assert inputs["weights"] == types.TensorData([0.0, 0.5, 1.0], "float32")


def test_whole_numbers_given_for_a_float_input_become_floats() -> None:
    datum = types.Datum(types.ModelInput.from_ints([1]), {"advantages": [1], "mask": [1], "my_own": [1]})
    assert {key: tensor.dtype for key, tensor in datum.loss_fn_inputs.items()} == {
        "advantages": "float32",
        "mask": "float32",
        "my_own": "int64",
    }


def test_ragged_or_wordy_input_is_refused_by_key() -> None:
    for bad in ([[1.0], [1.0, 2.0]], ["a"], [None]):
        with pytest.raises(mint.BadRequest, match="advantages"):
            types.Datum(types.ModelInput.from_ints([1]), {"advantages": bad})


def test_tensor_data_reads_like_a_list_and_like_an_array() -> None:
    tensor = types.TensorData(data=[1.0, 2.0, 3.0, 4.0], dtype="float32", shape=[2, 2])
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert tensor.data == [1.0, 2.0, 3.0, 4.0]
    assert tensor[1] == [3.0, 4.0]
    assert len(tensor) == 2
    assert [row[0] for row in tensor] == [1.0, 3.0]
    assert torch.equal(tensor.to_torch(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert types.TensorData.from_torch(tensor.to_torch()) == tensor == types.TensorData.from_numpy(tensor.to_numpy())
    for clone in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert clone == tensor


def test_changing_the_torch_copy_leaves_the_tensor_alone() -> None:
    tensor = types.TensorData([1.0], "float32")
    tensor.to_torch()[0] = 7.0
    assert tensor.data == [1.0]


@pytest.mark.parametrize("shape", [[3], [2, 2], [-1, 1]])
def test_values_that_do_not_fill_the_shape_are_refused(shape: list[int]) -> None:
    with pytest.raises(mint.BadRequest, match="shape"):
        types.TensorData([1, 2], "int64", shape)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_sparse_tensors_become_what_torch_makes_of_them(rows: int, columns: int, data: st.DataObject) -> None:
    cells = st.lists(st.floats(-9, 9, width=32), min_size=rows * columns, max_size=rows * columns)
    dense = torch.tensor(data.draw(cells)).reshape(rows, columns)
    csr = dense.to_sparse_csr()
    tensor = types.TensorData(
        csr.values().tolist(), "float32", [rows, columns], csr.crow_indices().tolist(), csr.col_indices().tolist()
    )
    assert torch.equal(tensor.to_torch(), dense)


@pytest.mark.parametrize(
    ("crow", "col"), [([0, 1], [0, 1]), ([0, 2, 1], [0, 1]), ([0, 1, 2], [0, 9]), ([0, 1, 2], [0]), (None, [0, 1])]
)
def test_a_malformed_sparse_tensor_is_refused(crow: list[int] | None, col: list[int]) -> None:
    with pytest.raises(mint.BadRequest, match="sparse"):
        types.TensorData([1.0, 2.0], "float32", [2, 2], crow, col)


# --------------------------------------------------------------------------------------------------------------------
# Parameters and the compatibility traps


def test_t1_stop_token_ids_are_merged_into_stop() -> None:
    assert types.SamplingParams(stop_token_ids=[2]).stop == [2]
    both = types.SamplingParams(stop=["\n", 5], stop_token_ids=[2])
    assert both.stop == ["\n", 5, 2]
    assert both.stop_strings == ["\n"]
    assert both.stop_ids == [5, 2]
    assert types.SamplingParams(stop="\n").stop == ["\n"]


def test_t1_any_other_unknown_key_is_refused_by_name() -> None:
    for build in (types.SamplingParams, types.AdamParams, types.LoraConfig, mint.SamplingParams):
        with pytest.raises(TypeError, match="stop_tokens"):
            build(stop_tokens=[2])


def test_an_empty_stop_list_turns_off_even_the_end_token() -> None:
    assert types.SamplingParams().stops_at_eos
    assert types.SamplingParams(stop=["x"]).stops_at_eos
    assert not types.SamplingParams(stop=[]).stops_at_eos


def test_t2_adam_defaults_are_the_documents_under_mint_and_the_sdks_under_tinker() -> None:
    ours, theirs = types.AdamParams(), tinker.types.AdamParams()
    assert (ours.learning_rate, ours.beta1, ours.beta2, ours.eps) == (2e-5, 0.9, 0.999, 1e-8)
    assert (theirs.learning_rate, theirs.beta1, theirs.beta2, theirs.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert theirs.weight_decay == theirs.grad_clip_norm == 0.0
    assert isinstance(theirs, types.AdamParams)


@pytest.mark.parametrize("module", [types, tinker.types])
def test_t2_both_spellings_of_the_betas_mean_the_same(module: object) -> None:
    assert module.AdamParams(betas=(0.8, 0.99)) == module.AdamParams(beta1=0.8, beta2=0.99)


def test_t5_each_surface_keeps_its_own_rank() -> None:
    import inspect

    def rank_of(method: object) -> int:
        return inspect.signature(method).parameters["rank"].default

    for twin in ("create_lora_training_client", "create_lora_training_client_async"):
        assert rank_of(getattr(mint.ServiceClient, twin)) == 16
        assert rank_of(getattr(tinker.ServiceClient, twin)) == 32
    assert types.LoraConfig().rank == 16
    assert tinker.LoraConfig().rank == 32


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: types.AdamParams(learning_rate=float("nan")), "learning_rate"),
        (lambda: types.AdamParams(beta1=1.0), "beta1"),
        (lambda: types.AdamParams(grad_clip_norm=-1), "grad_clip_norm"),
        (lambda: types.SamplingParams(max_tokens=0), "max_tokens"),
        (lambda: types.SamplingParams(max_tokens="8"), "max_tokens"),
        (lambda: types.SamplingParams(max_tokens=8.5), "max_tokens"),
        (lambda: types.SamplingParams(top_k=2.5), "top_k"),
        (lambda: types.SamplingParams(seed=1.5), "seed"),
        (lambda: types.LoraConfig(seed="1"), "seed"),
        (lambda: types.SamplingParams(temperature=-0.1), "temperature"),
        (lambda: types.SamplingParams(temperature=float("inf")), "temperature"),
        (lambda: types.SamplingParams(top_p=0.0), "top_p"),
        (lambda: types.SamplingParams(top_k=0), "top_k"),
        (lambda: types.SamplingParams(min_p=1.0), "min_p"),
        (lambda: types.SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (lambda: types.SamplingParams(presence_penalty=2.5), "presence_penalty"),
        (lambda: types.SamplingParams(frequency_penalty="1"), "frequency_penalty"),
        (lambda: types.SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (lambda: types.SamplingParams(logit_bias={1: 101}), "logit_bias"),
        (lambda: types.SamplingParams(logit_bias=[1]), "logit_bias"),
        (lambda: types.SamplingParams(regex=5), "regex"),
        (lambda: types.SamplingParams(json_schema="{}"), "json_schema"),
        (lambda: types.SamplingParams(regex="a", json_schema={}), "both regex and json_schema"),
        (lambda: types.SamplingParams(regex="a", stop=[]), "leave stop out"),
        (lambda: types.SamplingParams(stop=[""]), "stop"),
        (lambda: types.SamplingParams(stop=[1.5]), "stop"),
        (lambda: types.LoraConfig(rank=0), "rank"),
        (lambda: types.LoraConfig(train_mlp=False, train_attn=False, train_unembed=False), "train_mlp"),
        (lambda: types.TensorData([1], "float64"), "dtype"),
    ],
)
def test_values_out_of_range_are_refused_by_field(build: object, named: str) -> None:
    with pytest.raises(mint.BadRequest, match=named):
        build()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("text", "tokenizer.encode"),
        (["a", "b"], "flat list of token ids"),
        ([[1, 2], [3]], "flat list of token ids"),
        ([1.5], "flat list of token ids"),
        (None, "flat list of token ids"),
        ({"input_ids": [1], "attention_mask": [1]}, r"take \['input_ids'\]"),
    ],
)
def test_what_is_no_list_of_token_ids_is_refused_with_the_way_to_one(tokens: object, said: str) -> None:
    with pytest.raises(mint.BadRequest, match=said):
        types.ModelInput.from_ints(tokens)


def test_token_ids_may_come_as_an_array_or_a_tensor() -> None:
    for tokens in (np.array([3, 4]), torch.tensor([3, 4]), (3, 4), range(3, 5)):
        ids = types.ModelInput.from_ints(tokens).to_ints()
        assert ids == [3, 4] and all(type(token) is int for token in ids)


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = types.SamplingParams(max_tokens=np.int64(4), top_k=np.int32(3), seed=np.int64(2), top_p=np.float32(0.5))
    lora = types.LoraConfig(rank=np.int64(4), seed=np.int64(1))
    adam = types.AdamParams(learning_rate=np.float32(0.5**10))
    plain = json.loads(json.dumps([params.__dict__, lora.__dict__, adam.__dict__]))
    assert plain == [params.__dict__, lora.__dict__, adam.__dict__]


def test_a_datum_of_bare_token_ids_is_refused_with_what_to_wrap_them_in() -> None:
    with pytest.raises(mint.BadRequest, match=r"ModelInput\.from_ints"):
        types.Datum([1, 2], {"target_tokens": [2, 3]})


def test_a_learning_rate_that_would_undo_the_model_is_let_through_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="learning_rate is 1000"):
        assert types.AdamParams(learning_rate=1e3).learning_rate == 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        types.AdamParams(learning_rate=0.1)


def test_checkpoint_paths_are_taken_apart_under_either_scheme() -> None:
    for scheme in ("tinker", "mint"):
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(f"{scheme}://run:train:0/sampler_weights/step-1")
        assert parsed == types.ParsedCheckpointTinkerPath(
            "tinker://run:train:0/sampler_weights/step-1", "run:train:0", "sampler", "sampler_weights/step-1"
        )


@pytest.mark.parametrize(
    "path", ["", "run/weights/a", "http://run/weights/a", "tinker://run/weights", "tinker://r/w/a"]
)
def test_what_is_no_checkpoint_path_is_refused_with_the_form_to_use(path: str) -> None:
    with pytest.raises(mint.BadRequest, match="tinker://<training run>"):
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
