"""The published clients against `mint serve`, scenario by scenario; see `scripts/` for what each of them does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.compat.clients import NEWEST, OLDEST, TOOLKIT, Client, Kind


def only(*kinds: Kind) -> pytest.MarkDecorator:
    """For what only these clients can ask."""
    return pytest.mark.parametrize("client", kinds, ids=lambda kind: kind.name, indirect=True)


PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}


def assert_refused(refusals: dict[str, Any], **words: str) -> None:
    """Each mistake was answered by an error that names what is wrong."""
    for name, word in words.items():
        assert refusals[name]["error"], f"{name} was not refused"
        assert word in refusals[name]["words"], f"{name}: {refusals[name]}"


# Training -------------------------------------------------------------------------------------------------------------


def test_a_step_is_submitted_in_one_go_and_lowers_the_loss(client: Client) -> None:
    """forward_backward, optim_step and forward without waiting in between."""
    facts = client.facts("training", "a_pipelined_step")
    rows = zip(facts["logprobs"], facts["weights"], strict=True)
    by_hand = -sum(p * w for logprobs, weights in rows for p, w in zip(logprobs, weights, strict=True))
    assert facts["loss"] == pytest.approx(by_hand, rel=1e-5)
    assert facts["loss_after"] < facts["loss"]


def test_forward_leaves_the_gradients_alone(client: Client) -> None:
    """A step after nothing but forward moves no weight."""
    assert client.facts("training", "forward_only")["moved"] == 0.0


def test_a_batch_of_three_chunks_counts_as_one(client: Client) -> None:
    """2100 datums; the client posts chunks at once, the first of them last."""
    facts = client.facts("training", "three_chunks")
    assert facts["lengths"] == [1 + n % 3 for n in range(2100)]
    assert facts["loss"] == pytest.approx(-facts["total"], rel=1e-5)
    assert facts["loss_in_parts"] == pytest.approx(facts["loss"], rel=1e-5)
    assert facts["difference_after_a_step"] < 1e-3


def test_reinforcement_losses_have_their_published_values(client: Client) -> None:
    """importance_sampling, ppo, cispo and dro against plain arithmetic, with weights."""
    facts = client.facts("training", "reinforcement_losses")
    expected = dict.fromkeys(facts["losses"], 0.0)
    for p, q, advantage, weight in zip(
        facts["now"], facts["logprobs"], facts["advantages"], facts["weights"], strict=True
    ):
        ratio = math.exp(p - q)
        clipped = min(max(ratio, 0.8), 1.2)
        expected["importance_sampling"] -= weight * ratio * advantage
        expected["ppo"] -= weight * min(ratio * advantage, clipped * advantage)
        expected["cispo"] -= weight * clipped * p * advantage
        expected["dro"] -= weight * (p * advantage - 0.5 * 0.05 * (p - q) ** 2)
    assert facts["losses"] == pytest.approx(expected, rel=1e-4)


@only(NEWEST)
def test_gspo_is_plain_policy_gradient_on_fresh_samples(client: Client) -> None:
    """The loss name that clients know from 0.34 on."""
    assert client.facts("training", "sequence_loss")["loss"] == pytest.approx(-4.0, rel=1e-4)


def test_a_custom_loss_in_the_client_trains_like_the_built_in_one(client: Client) -> None:
    """forward_backward_custom; the older client borrows torch from the newer one's environment."""
    facts = client.facts("custom_loss", "like_the_built_in")
    assert facts["metrics"]["mine"] == pytest.approx(facts["loss"], rel=1e-5)
    assert facts["difference_after_a_step"] < 1e-5


@only(NEWEST)
def test_a_traced_loss_runs_in_the_client(client: Client) -> None:
    """create_custom_loss, which the SDK runs itself where a server does not."""
    facts = client.facts("custom_loss", "traced")
    assert facts["metrics"]["custom/likelihood:sum"] == pytest.approx(facts["loss"], rel=1e-5)


def test_preference_optimisation_by_a_custom_loss_lowers_it(client: Client) -> None:
    """Direct preference optimisation: weights of both signs reach the server."""
    losses = client.facts("custom_loss", "preferences")["losses"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < 0.5 * losses[0]


def test_model_facts_and_tokenizer_reach_the_client(client: Client) -> None:
    """get_info, get_tokenizer and get_server_capabilities."""
    facts = client.facts("training", "facts_of_the_model")
    assert facts == {
        "served": ["mint/tiny"],
        "name": "mint/tiny",
        "rank": 8,
        "tokens": list(b"A: 42"),
        "eos": 258,
    }


def test_the_async_calls_do_the_same(client: Client) -> None:
    """The `_async` twins, awaited and gathered."""
    facts = client.facts("training", "asynchronous_twins")
    assert facts["losses"][0] == pytest.approx(facts["losses"][1], rel=1e-6)
    assert (facts["rank"], facts["samples"], facts["logprobs"]) == (8, [1, 1, 1], 20)


def test_two_adapters_trained_in_turn_do_not_mix(client: Client) -> None:
    """Two training clients on one base model, as in TuFT's tests."""
    facts = client.facts("training", "two_adapters_interleaved")
    for losses in facts["losses"].values():
        assert losses[-1] < 0.4 * losses[0]
    assert facts["up_on_down"] > 2 * facts["down_on_down"]


# Learning -------------------------------------------------------------------------------------------------------------


def test_ten_steps_of_supervised_training_halve_the_loss(client: Client) -> None:
    """Sixteen additions on mint/tiny."""
    losses = client.facts("learning", "by_example")["losses"]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]


def test_reinforcement_raises_the_reward(client: Client) -> None:
    """Eight steps of group-centred advantages on additions."""
    rewards = client.facts("learning", "by_reward")["rewards"]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.15


# Sampling -------------------------------------------------------------------------------------------------------------


def test_base_models_checkpoints_and_snapshots_can_be_sampled(client: Client) -> None:
    """By name, by path and from memory; later training leaves a snapshot alone."""
    facts = client.facts("sampling", "three_sources")
    assert facts["path"].startswith("tinker://")
    assert all(len(tokens) > 1 for answers in facts["answers"].values() for tokens in answers)
    assert facts["scores"]["path"] == pytest.approx(facts["scores"]["snapshot"], abs=1e-3)
    assert facts["scores"]["path"] > facts["scores"]["base"]
    assert facts["snapshot_moved"] == 0.0


def test_a_seed_repeats_a_group_and_its_members_differ(client: Client) -> None:
    """num_samples, seed, log-probs of every sampled token."""
    facts = client.facts("sampling", "groups_and_seeds")
    once, again, other = facts["drawn"]
    assert once == again != other
    assert len({tuple(tokens) for tokens in once}) > 1
    assert all(tokens == logprobs and largest <= 0 for tokens, logprobs, largest in facts["logprobs"])
    assert set(facts["reasons"]) <= {"stop", "length"}


def test_samples_stop_at_tokens_strings_the_end_and_the_limit(client: Client) -> None:
    """The stop is part of the sample; `stop_token_ids`, which the SDK drops, is not missed."""
    facts = client.facts("sampling", "stops")
    whole, reason = facts["whole"]
    assert (whole[-1], reason) == (258, "stop")
    assert facts["by_token"] == [whole[:2], "stop"]
    assert facts["by_string"] == [whole[:2], "stop"]
    assert facts["by_length"] == [whole[:1], "length"]
    assert facts["by_dropped_name"] == [whole, "stop"]
    assert facts["top_k_1"] == whole


def test_prompt_logprobs_agree_with_the_trainer(client: Client) -> None:
    """include_prompt_logprobs, topk_prompt_logprobs, compute_logprobs."""
    facts = client.facts("sampling", "prompt_logprobs")
    assert facts["first"] is None and facts["unasked"] is None
    assert facts["difference_to_trainer"] < 1e-4
    assert facts["difference_to_compute"] < 1e-5
    first, *rows = facts["topk"]
    assert first is None
    for row, token, logprob in zip(rows, facts["tokens"][1:], facts["prompt_logprobs"][1:], strict=True):
        assert len(row) == 3
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert all(value == pytest.approx(logprob, abs=1e-5) for best, value in row if best == token)


def test_twenty_samples_at_once_are_all_answered(client: Client) -> None:
    """All with the same prompt and seed, so that all are the same."""
    answers = client.facts("sampling", "twenty_at_once")["answers"]
    assert len(answers) == 20
    assert all(answer == answers[0] for answer in answers)


def test_a_sampling_client_knows_its_model_and_tokenizer(client: Client) -> None:
    """get_base_model and get_tokenizer of a sampling client."""
    facts = client.facts("sampling", "names")
    assert facts["base_model"].endswith("tiny")
    assert facts["tokens"] == list(b"A: 42")


def test_a_pickled_sampling_client_works_in_another_process(client: Client) -> None:
    """Original and copy ask at the same time."""
    facts = client.facts("sampling", "in_another_process")
    assert facts["there"] == facts["here"]


@only(NEWEST)
def test_newer_sampling_options_are_honoured(client: Client) -> None:
    """Top-k of samples, log-probs of chosen tokens, alternatives, a scored suffix, no stop at all, sampler handles."""
    facts = client.facts("sampling", "newest_options")
    whole, suffix = facts["whole"], facts["prompt_logprobs"]
    assert suffix[:-2] == [None] * (len(whole) - 2)
    assert suffix[-2:] == pytest.approx(whole[-2:], abs=1e-5)
    assert facts["target_shape"] == [len(whole) - 1, 2]
    assert facts["target"][-2] == pytest.approx(whole[-1], abs=1e-5)
    assert facts["target"][-1] < facts["target"][-2]
    assert facts["alternatives"] == [len(whole) - 1, 3]
    for token, logprob, row in zip(*facts["sampled"], facts["topk_sampled"], strict=True):
        assert row[str(token)] == pytest.approx(logprob, abs=1e-5)
    assert len(facts["endless"]) == 40
    assert facts["copy"] == facts["original"]


# Checkpoints and management -------------------------------------------------------------------------------------------


def test_loading_a_state_undoes_later_training(client: Client) -> None:
    """save_state and load_state on a live client."""
    facts = client.facts("checkpoints", "load_in_place")
    assert facts["path"].startswith("tinker://")
    assert facts["moved"] > 0.1
    assert facts["left"] < 1e-5


def test_a_run_resumes_exactly_with_its_optimizer(client: Client) -> None:
    """create_training_client_from_state(_with_optimizer), and load_state_with_optimizer on a fresh client."""
    facts = client.facts("checkpoints", "resume")
    assert all(found["at_load"] < 1e-5 for found in facts.values())
    assert facts["weights_and_optimizer"]["after_a_step"] < 1e-5
    assert facts["fresh_client"]["after_a_step"] < 1e-5
    assert facts["weights"]["after_a_step"] > 1e-3


def test_runs_sessions_and_checkpoints_are_listed(client: Client) -> None:
    """The REST client: training runs, checkpoints, sessions, samplers, weights info, metadata."""
    facts = client.facts("checkpoints", "catalogue")
    state, weights = facts["paths"]
    assert facts["checkpoints"] == [["sampler_weights/one", "sampler", weights], ["weights/one", "training", state]]
    assert facts["expiring"] == ["weights/one"]
    assert facts["info"] == ["mint/tiny", True, 4]
    assert (facts["base_model"], facts["rank"], facts["metadata"]) == ("mint/tiny", 4, {"renderer": "plain"})
    assert facts["listed"] and facts["counted"] and facts["mine"] and facts["session_known"]
    assert facts["session_runs"] == [facts["run"]]
    assert (facts["session_samplers"], facts["sampler"]) == (1, weights)


def test_checkpoints_expire_are_published_and_deleted(client: Client) -> None:
    """TTL set and removed, publish and unpublish, delete; a name that is taken is refused at once."""
    facts = client.facts("checkpoints", "care")
    assert facts["seen"] == [
        {"weights/kept": [False, False], "weights/doomed": [False, False]},
        {"weights/kept": [True, True]},
        {"weights/kept": [False, False]},
    ]
    assert_refused(facts, twice="exists already", gone="no checkpoint")
    assert facts["still_trains"]


@only(OLDEST, TOOLKIT)
def test_a_checkpoint_archive_is_a_peft_adapter(client: Client) -> None:
    """The download link of clients up to 0.35."""
    facts = client.facts("checkpoints", "archive")
    assert set(facts["names"]) >= PEFT_FILES
    assert (facts["adapter"]["peft_type"], facts["adapter"]["r"]) == ("LORA", 4)


@only(NEWEST)
def test_external_weights_are_a_peft_adapter(client: Client) -> None:
    """The download links of clients from 0.28 on."""
    facts = client.facts("checkpoints", "external_weights")
    assert "/external_weights/" in facts["path"]
    assert set(facts["names"]) >= PEFT_FILES
    assert (facts["adapter"]["peft_type"], facts["adapter"]["r"]) == ("LORA", 4)


@only(OLDEST, TOOLKIT)
def test_weights_exported_by_newer_clients_do_not_spoil_the_lists(client: Client) -> None:
    """Clients before 0.28 refuse a whole list that has external weights in it, so they are not shown any."""
    facts = client.facts("checkpoints", "beside_newer_clients")
    assert facts["saved"].endswith("/external_weights/theirs")
    assert facts["listed"] == ["weights/mine"]
    assert set(facts["types"]) == {"training", "sampler"}


@only(NEWEST, OLDEST)
def test_the_tinker_command_lists_and_downloads(client: Client) -> None:
    """`tinker run info`, `tinker checkpoint list` and `tinker checkpoint download`; the command takes no sk- keys."""
    facts = client.facts("checkpoints", "command_line")
    assert facts["run"]["base_model"] == "mint/tiny"
    assert facts["listed"]
    assert set(facts["files"]) >= PEFT_FILES


@only(TOOLKIT)
def test_an_uploaded_archive_can_be_trained_on(client: Client) -> None:
    """Down as an archive, up as a form, loaded with its optimizer."""
    facts = client.facts("toolkit", "uploaded_checkpoint")
    assert facts["left"] < 1e-5
    assert facts["after_a_step"] < 1e-5


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_at_once(client: Client) -> None:
    """An AuthenticationError that says which variable to set."""
    facts = client.facts("mistakes", "wrong_key")
    assert (facts["error"], facts["status"]) == ("AuthenticationError", 401)
    assert "MINT_API_KEY" in facts["words"]


def test_unknown_models_and_paths_are_refused_at_once(client: Client) -> None:
    """For training and for sampling; the answer names what is served."""
    facts = client.facts("mistakes", "unknown_model")
    assert_refused(facts, training="mint/tiny", sampling="mint/tiny", path="no checkpoint")


def test_bad_data_is_refused_in_words_and_a_good_step_follows(client: Client) -> None:
    """Unequal lengths, unknown tokens, NaN, missing inputs, unknown losses, too long a text."""
    facts = client.facts("mistakes", "bad_data")
    assert_refused(
        facts["refusals"],
        unequal_lengths="weights has length 1",
        beyond_the_vocabulary="5000",
        nan_advantages="nan" if client.kind is NEWEST else "JSON",  # older clients cannot even send it
        missing_input="logprobs",
        unknown_loss="no_such_loss",
        too_long="3999",
    )
    first, second = facts["losses"]
    assert second < first


def test_a_bad_datum_does_not_hold_up_what_was_sent_after_it(client: Client) -> None:
    """The number of a refused request is spent, not waited for."""
    facts = client.facts("mistakes", "a_bad_datum_in_a_pipeline")
    assert facts["bad"]["error"] == "BadRequestError"
    assert facts["step"]
    assert facts["after"] < facts["loss"]


def test_bad_samples_are_refused_in_words_and_a_good_one_follows(client: Client) -> None:
    """An empty prompt, unknown tokens, more tokens than the context holds, a negative temperature."""
    facts = client.facts("mistakes", "bad_samples")
    assert_refused(
        facts["refusals"],
        empty_prompt="empty",
        beyond_the_vocabulary="5000",
        beyond_the_context="context of 1024",
        negative_temperature="temperature",
    )
    assert facts["good"] == 1


@only(NEWEST)
def test_what_the_server_does_not_have_is_refused_in_words(client: Client) -> None:
    """Images, stable_reinforce, dimuon, age encryption, projects, audit log: an error, never a hang."""
    facts = client.facts("mistakes", "unsupported")
    assert_refused(
        facts["refusals"],
        image="text only",
        stable_reinforce="stable_reinforce",
        dimuon="adamw",
        age_encryption="encrypt",
        projects="hosted service",
        copy_to_a_project="no projects",
        audit_log="hosted service",
    )
    assert facts["loss"] > 0


@only(TOOLKIT)
def test_the_toolkit_interpolates_checkpoints(client: Client) -> None:
    """Adapters of different ranks; the sum of what each adds to the base model's weights."""
    facts = client.facts("toolkit", "interpolation")
    assert facts["answer"]["path"].endswith("/sampler_weights/half")
    assert (facts["answer"]["source_paths"], facts["answer"]["coefficients"]) == (facts["paths"], [0.5, 0.5])
    assert facts["whole"] == pytest.approx(facts["trained"], abs=1e-4)
    assert facts["half"] != pytest.approx(facts["trained"], abs=1e-3)
    assert facts["half"] != pytest.approx(facts["base"], abs=1e-3)


@only(TOOLKIT)
def test_the_toolkit_distils_by_reverse_kl(client: Client) -> None:
    """forward_backward_reverse_kl over the whole vocabulary; the loss comes back position by position."""
    first, last = client.facts("toolkit", "reverse_kl")["answers"]
    assert len(first["outputs"][0]["loss"]["data"]) == 3 and first["outputs"][0]["loss"]["data"][0] == 0.0
    assert sum(first["outputs"][0]["loss"]["data"]) == pytest.approx(first["metrics"]["loss:sum"], rel=1e-4)
    assert last["metrics"]["kl:mean"] < 0.5 * first["metrics"]["kl:mean"]
