"""The one table of every argument anybody can give: what proves that it is honoured, or refused, or why it is neither.

An entry is the name of a test, as `file::function` below `tests/`, that shows the argument to change something;
`refused(...)`, with the test that shows it refused by name; or `inert(...)`, with the reason why it may do nothing.
`test_every_argument.py` holds the table against the code, docs/arguments.md is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    test: str


@dataclass(frozen=True)
class Inert:
    reason: str


Entry = str | Refused | Inert


def refused(test: str) -> Refused:
    return Refused(test)


def inert(reason: str) -> Inert:
    return Inert(reason)


KIND = inert("Says what kind of request it is, which the address says already.")
CHANGES = "arguments/test_behaviour.py::test_an_argument_changes_what_it_is_said_to_change"
CLIENT = "client/test_with_server.py::"
TRAINING = "server/test_training.py::"
SAVING = "server/test_checkpoints.py::"
SAMPLING = "server/test_sampling.py::"
SERVICE = "server/test_service.py::"
OPENAI = "server/test_openai.py::"
FUZZ = "arguments/test_wire_arguments.py::"

ONE_STEP = TRAINING + "test_a_whole_step_in_json"
IN_ORDER = TRAINING + "test_the_first_chunk_may_come_last"
SAVED = SAVING + "test_listings_tell_size_time_and_metadata"
EXPIRES = SAVING + "test_an_expired_checkpoint_is_gone_from_listing_loading_and_disk"
ONCE = SAVING + "test_a_taken_name_is_refused_unless_it_may_be_overwritten"
COPIED = SAVING + "test_a_copy_outlives_its_source"
FROM_STATE = SAVING + "test_a_new_model_starts_from_a_checkpoint_in_one_request"
CREATED = TRAINING + "test_creating_a_model_twice_under_one_number_gives_one_model"
NOT_CREATED = TRAINING + "test_what_create_model_cannot_honour_is_refused_by_name"
SESSION = SERVICE + "test_sessions_remember_what_they_were_told_and_the_first_reason_for_their_end"
REST = CLIENT + "test_runs_sessions_and_checkpoints_are_listed_and_looked_after"
STATE = CLIENT + "test_t11_state_is_saved_found_and_loaded_again"
SAMPLED = SAMPLING + "test_every_field_of_newer_clients_reaches_the_backend"
CLONES = SAMPLING + "test_finished_samples_of_a_clone_can_be_asked_for_together"
INTERPOLATED = SERVICE + "test_checkpoints_are_interpolated_into_sampler_weights_of_their_own"
REVERSE_KL = SERVICE + "test_reverse_kl_reaches_the_backend_with_both_texts_aligned_at_their_end"
DISTILLED = "test_end_to_end.py::test_reverse_kl_distils_a_teacher_who_is_told_more"
REFUSED_BY_OPENAI_ROUTE = OPENAI + "test_what_cannot_be_honoured_is_refused_by_name_in_openais_shape"
TELLS_NOTHING = "Says who asks or how the answer is booked; the answer is the same."

# ------------------------------------------------------------------------------------------------ small JSON bodies

REQUESTS: dict[str, dict[str, Entry]] = {
    "Body": {"type": KIND},
    "ClientConfigBody": {"sdk_version": CLIENT + "test_an_archive_link_needs_no_key_and_holds_the_adapter"},
    "CreateSession": {
        "tags": FUZZ + "test_what_a_session_was_told_can_be_read_back",
        "user_metadata": SESSION,
        "sdk_version": FUZZ + "test_what_a_session_was_told_can_be_read_back",
        "project_id": FUZZ + "test_what_a_session_was_told_can_be_read_back",
        "display_name": SESSION,
    },
    "Heartbeat": {"session_id": SAMPLING + "test_a_silent_session_gives_its_memory_back_and_an_active_one_does_not"},
    "FinishReason": {"type": SESSION},
    "FinishSession": {
        "reason": SESSION,
        "detail": inert("Free text beside the reason, for the hosted service's console; the reason is kept."),
    },
    "Lora": dict.fromkeys(("rank", "seed", "train_unembed", "train_mlp", "train_attn"), CHANGES),
    "OptimizerConfig": {"type": refused(NOT_CREATED)},
    "CreateModel": {
        "session_id": CREATED,
        "model_seq_id": CREATED,
        "base_model": TRAINING + "test_an_unknown_base_model_names_those_there_are",
        "user_metadata": SAVED,
        "lora_config": NOT_CREATED,
        "optimizer_config": refused(NOT_CREATED),
    },
    "ModelBody": {"model_id": TRAINING + "test_get_info_points_to_the_tokenizer_on_this_machine"},
    "NumberedBody": {"seq_id": IN_ORDER},
    "OptimStep": {
        "adam_params": ONE_STEP,
        "optimizer_params": refused(TRAINING + "test_other_optimizers_are_refused_at_the_step_too"),
    },
    "SaveBody": {"path": ONCE, "ttl_seconds": EXPIRES},
    "SaveWeights": {"overwrite": ONCE, "user_metadata": SAVED},
    "SaveWeightsForSampler": {
        "sampling_session_seq_id": SAMPLING + "test_a_snapshot_sent_again_under_a_fresh_session_number_is_the_same",
        "user_metadata": SAVED,
        "overwrite": CLIENT + "test_the_sampler_is_frozen_named_or_not",
    },
    "SaveWeightsExternal": {
        "age_encryption_recipients": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name")
    },
    "LoadWeights": {
        "path": FROM_STATE,
        "optimizer": STATE,
        "model_id": STATE,
        "seq_id": IN_ORDER,
        "session_id": FROM_STATE,
        "model_seq_id": FROM_STATE,
        "base_model": FUZZ + "test_a_checkpoint_loaded_onto_another_base_model_is_refused",
        "user_metadata": FUZZ + "test_metadata_of_a_model_made_by_loading_is_kept",
        "optimizer_config": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
        "weights_access_token": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
    },
    "CopyWeights": {
        "source_path": COPIED,
        "session_id": COPIED,
        "model_seq_id": COPIED,
        "destination_project_id": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
        "ttl_seconds": FUZZ + "test_a_copy_may_have_an_end_of_its_own",
        "weights_access_token": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
    },
    "CreateSamplingSession": {
        "session_id": SAMPLING + "test_the_same_session_number_is_the_same_sampling_session",
        "sampling_session_seq_id": SAMPLING + "test_the_same_session_number_is_the_same_sampling_session",
        "base_model": SAMPLING + "test_sampling_what_does_not_exist_is_refused_when_the_session_is_made",
        "model_path": SAMPLING + "test_a_named_checkpoint_is_sampled_by_its_path_under_either_scheme",
    },
    "SamplingSessionBody": {
        "sampling_session_id": SAMPLING + "test_joining_a_sampling_session_gives_every_client_its_own_number"
    },
    "RetrieveFuture": {
        "request_id": TRAINING + "test_an_unknown_request_is_404",
        "allow_metadata_only": inert("Allows the server to tell the size before the result; it sends the result."),
        "model_id": inert("A hint for servers that keep results by model; the request's own id is enough."),
    },
    "CompletionTarget": {"type": KIND, "cloned_sampler_id": CLONES},
    "RetrieveFutures": {
        "target": CLONES,
        "prev_cursor": CLONES,
        "timeout": CLONES,
        "retrieved_request_ids": inert("Allows the server to forget these results early; they go with the others."),
    },
    "CancelFuture": {"request_id": SAMPLING + "test_a_cancelled_sample_is_cancelled_in_the_backend"},
    "WeightsInfo": {"tinker_path": SAVING + "test_weights_info_tells_how_to_make_a_model_like_it"},
    "SetTtl": {"ttl_seconds": REST},
    "ReverseKL": dict.fromkeys(("reference_model_path", "data", "temperature"), REVERSE_KL),
    "Interpolate": {
        **dict.fromkeys(("source_paths", "coefficients", "output_path"), INTERPOLATED),
        "output_checkpoint_type": refused(SERVICE + "test_what_cannot_be_interpolated_is_refused"),
    },
}

OPENAI_REQUESTS: dict[str, dict[str, Entry]] = {
    "StreamOptions": {
        "include_usage": OPENAI + "test_a_stream_is_the_same_text_in_pieces_with_usage_at_the_end",
        "include_obfuscation": refused(FUZZ + "test_the_chat_route_refuses_what_it_cannot_honour"),
    },
    "CommonBody": {
        "model": OPENAI + "test_an_unknown_model_is_404_and_a_wrong_key_401",
        "n": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "temperature": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "top_p": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "top_k": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "min_p": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "seed": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "stop": OPENAI + "test_text_stops_before_the_stop_string",
        "stop_token_ids": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "max_tokens": OPENAI + "test_a_length_limit_under_either_name_is_told",
        "stream": OPENAI + "test_tokens_are_streamed_while_the_sample_runs",
        "stream_options": OPENAI + "test_a_stream_is_the_same_text_in_pieces_with_usage_at_the_end",
        "repetition_penalty": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "presence_penalty": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "frequency_penalty": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "logit_bias": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "response_format": FUZZ + "test_response_formats_reach_the_backend",
        "regex": FUZZ + "test_sampling_fields_of_the_chat_route_reach_the_backend",
        "user": inert(TELLS_NOTHING),
    },
    "CompletionBody": {
        "prompt": OPENAI + "test_completions_take_text_tokens_and_several_prompts",
        "logprobs": OPENAI + "test_echo_scores_the_prompt_even_when_nothing_is_generated",
        "echo": OPENAI + "test_echo_scores_the_prompt_even_when_nothing_is_generated",
        "best_of": refused(FUZZ + "test_the_completion_route_refuses_what_it_cannot_honour"),
        "suffix": refused(FUZZ + "test_the_completion_route_refuses_what_it_cannot_honour"),
    },
    "ResponseFormat": dict.fromkeys(("type", "json_schema"), FUZZ + "test_response_formats_reach_the_backend"),
    "JsonSchema": {
        "schema": FUZZ + "test_response_formats_reach_the_backend",
        "strict": refused(FUZZ + "test_the_chat_route_refuses_what_it_cannot_honour"),
        "name": inert("A name for people; answers follow the schema."),
        "description": inert("Words for models that are shown the schema; here answers follow it unseen."),
    },
    "ChatBody": {
        "messages": OPENAI + "test_a_chat_is_rendered_by_the_template_and_answered_without_the_end_token",
        "max_completion_tokens": OPENAI + "test_a_length_limit_under_either_name_is_told",
        "logprobs": OPENAI + "test_chat_logprobs_leave_out_the_end_token",
        "top_logprobs": OPENAI + "test_chat_logprobs_leave_out_the_end_token",
        "tools": OPENAI + "test_tools_reach_the_template_and_calls_come_back",
        "tool_choice": refused(FUZZ + "test_the_chat_route_refuses_what_it_cannot_honour"),
        "parallel_tool_calls": inert("The model calls as many tools as it writes; the field only permits several."),
        "chat_template_kwargs": FUZZ + "test_template_arguments_reach_the_template",
        "metadata": inert(TELLS_NOTHING),
        "store": refused(FUZZ + "test_the_chat_route_refuses_what_it_cannot_honour"),
        "service_tier": inert(TELLS_NOTHING),
    },
}

ADMIN = "server/test_tenants.py::test_an_administrator_sees_and_looks_after_what_others_saved"
USAGE = "client/test_tenants.py::test_usage_is_told_by_key_run_and_time"
QUERIES: dict[str, dict[str, Entry]] = {
    "GET /api/v1/training_runs": {
        "limit": REST,
        "offset": REST,
        "access_scope": SAVING + "test_others_see_only_what_is_published_and_change_nothing",
        "project_id": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
    },
    "GET /api/v1/training_runs/{run}": {
        "access_scope": SAVING + "test_others_see_only_what_is_published_and_change_nothing"
    },
    "GET /api/v1/checkpoints": {"limit": REST, "offset": REST},
    "GET /api/v1/sessions": {
        "limit": REST,
        "offset": REST,
        "access_scope": ADMIN,
    },
    "GET /api/v1/mint/usage": dict.fromkeys(("key", "run", "since"), USAGE),
    "GET /api/v1/sessions/{session_id}": {
        "access_scope": inert("One may see a session or not, under either word: only administrators see others'.")
    },
}

# ------------------------------------------------------------------------------------------------ the big bodies

PARAMS = (
    "max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "regex", "json_schema", "stop_token_ids",
)  # fmt: skip
ASKED = (
    "sampling_params", "num_samples", "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs",
    "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n",
)  # fmt: skip
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm", "betas")
SPARSE = "test_types.py::test_sparse_tensors_become_what_torch_makes_of_them"
SPANS = refused(FUZZ + "test_what_serves_other_losses_is_refused_by_name")
PICTURES = refused(FUZZ + "test_chunks_that_are_not_text_are_refused_by_name")

WIRE: dict[str, dict[str, Entry]] = {
    "asample": {
        "prompt": CHANGES,
        **dict.fromkeys(ASKED, CHANGES),
        "sampling_session_id": SAMPLING + "test_a_sampling_session_keeps_its_weights_while_training_goes_on",
        "seq_id": SAMPLING + "test_a_sample_sent_again_is_the_same_sample_and_numbers_impose_no_order",
        "base_model": SAMPLING + "test_a_sample_can_ask_a_base_model_without_a_session",
        "model_path": FUZZ + "test_a_sample_can_ask_a_checkpoint_without_a_session",
        "type": KIND,
        "record_stability_info": refused(FUZZ + "test_what_serves_other_losses_is_refused_by_name"),
    },
    "forward_backward": {
        "forward_backward_input": ONE_STEP,
        "model_id": ONE_STEP,
        "seq_id": IN_ORDER,
        "type": KIND,
    },
    "forward_backward_input": {"data": ONE_STEP, "loss_fn": CHANGES, "loss_fn_config": CHANGES},
    "protobuf ForwardBackwardRequest": {
        "model_id": TRAINING + "test_a_protobuf_batch_arrives_as_sent_and_its_result_comes_back_as_protobuf",
        "seq_id": IN_ORDER,
        "data": TRAINING + "test_a_protobuf_batch_arrives_as_sent_and_its_result_comes_back_as_protobuf",
        "loss_fn": "test_wire.py::test_a_request_survives_protobuf",
        "loss_fn_config": "test_wire.py::test_the_bytes_of_a_request_are_those_of_the_protocol",
        "forward_only": TRAINING + "test_forward_in_either_dialect_leaves_gradients_alone",
        "loss_fn_config_v2": "test_wire.py::test_a_request_survives_protobuf",
    },
    "protobuf Datum": {
        "model_input": "test_wire.py::test_a_request_survives_protobuf",
        "loss_fn_inputs": "test_wire.py::test_a_request_survives_protobuf",
        "model_input_spans": SPANS,
        "loss_fn_input_spans": SPANS,
    },
    "protobuf Chunk": {
        "encoded_text": "test_wire.py::test_a_request_survives_protobuf",
        "image": PICTURES,
        "dmel": PICTURES,
    },
    "protobuf EncodedTextChunk": {"tokens": "test_wire.py::test_a_request_survives_protobuf"},
    "protobuf Tensor": {
        "dense": "test_wire.py::test_a_request_survives_protobuf",
        "sparse_csr": FUZZ + "test_sparse_tensors_arrive_dense_in_either_dialect",
        "dtype": "test_wire.py::test_bfloat16_and_int32_results_are_widened",
        "shape": "test_wire.py::test_a_request_survives_protobuf",
    },
    "protobuf SparseCsr": dict.fromkeys(
        ("values", "crow_indices", "col_indices"), FUZZ + "test_sparse_tensors_arrive_dense_in_either_dialect"
    ),
    "protobuf LossConfigValue": dict.fromkeys(("number", "text"), "test_wire.py::test_a_request_survives_protobuf"),
}

TYPES: dict[str, dict[str, Entry]] = {
    "SamplingParams": dict.fromkeys(PARAMS, CHANGES),
    "SampleRequest": {"prompt": CHANGES, **dict.fromkeys(ASKED, CHANGES)},
    "AdamParams": dict.fromkeys(ADAM, CHANGES),
    "LoraConfig": dict.fromkeys(("rank", "seed", "train_unembed", "train_mlp", "train_attn"), CHANGES),
    "TensorData": {
        "data": "test_types.py::test_tensor_data_reads_like_a_list_and_like_an_array",
        "dtype": "test_types.py::test_whole_numbers_given_for_a_float_input_become_floats",
        "shape": "test_types.py::test_values_that_do_not_fill_the_shape_are_refused",
        "sparse_crow_indices": SPARSE,
        "sparse_col_indices": SPARSE,
    },
    "Datum": {"model_input": ONE_STEP, "loss_fn_inputs": ONE_STEP},
    "ReverseKLDatum": dict.fromkeys(("student_input", "reference_input", "target_tokens", "weights"), DISTILLED),
    "ModelInput": {"chunks": "test_types.py::test_model_input_length_is_the_number_of_its_ids"},
    "EncodedTextChunk": {
        "tokens": "test_types.py::test_model_input_round_trips_token_ids",
        "type": KIND,
    },
}

# ------------------------------------------------------------------------------------------------ our client

LISTED = {"limit": REST, "offset": REST}
PUBLISHED = FUZZ + "test_the_scope_of_a_clients_listing_is_honoured"
NAMED = {"name": STATE, "ttl_seconds": STATE, "overwrite": STATE, "user_metadata": STATE}
DATA: dict[str, Entry] = {"data": CHANGES, "loss_fn": CHANGES, "loss_fn_config": CLIENT + "test_loss_options_arrive"}
ADDRESS: dict[str, Entry] = {
    "base_url": "client/test_transport.py::test_an_address_where_nobody_listens_is_told_soon",
    "api_key": "client/test_transport.py::test_a_wrong_key_is_one_clear_error_and_no_retry",
}
BY_PATH: dict[str, Entry] = {"tinker_path": REST}

CLIENT_CALLS: dict[str, dict[str, Entry]] = {
    "ServiceClient.__init__": {
        **ADDRESS,
        "user_metadata": REST,
        "project_id": FUZZ + "test_what_a_session_was_told_can_be_read_back",
    },
    "ServiceClient.close": {
        "status": "client/test_transport.py::test_leaving_the_block_finishes_the_session",
        "detail": "client/test_transport.py::test_leaving_the_block_finishes_the_session",
    },
    "ServiceClient.create_lora_training_client": {
        "base_model": "client/test_training.py::test_creating_a_client_says_what_was_asked_for",
        **dict.fromkeys(("rank", "seed", "train_mlp", "train_attn", "train_unembed"), CHANGES),
        "user_metadata": "client/test_training.py::test_creating_a_client_says_what_was_asked_for",
    },
    "ServiceClient.create_training_client_from_state": {
        "path": STATE,
        "user_metadata": "client/test_training.py::test_t11_a_client_from_state_takes_its_shape_from_the_checkpoint",
    },
    "ServiceClient.create_training_client_from_state_with_optimizer": {
        "path": STATE,
        "user_metadata": "client/test_training.py::test_t11_a_client_from_state_takes_its_shape_from_the_checkpoint",
    },
    "ServiceClient.create_sampling_client": {
        "model_path": "client/test_sampling.py::test_exactly_one_of_path_and_model",
        "base_model": "client/test_sampling.py::test_exactly_one_of_path_and_model",
    },
    "TrainingClient.forward": DATA,
    "TrainingClient.forward_backward": DATA,
    "TrainingClient.forward_backward_custom": dict.fromkeys(
        ("data", "loss_fn"), "test_end_to_end.py::test_a_custom_loss_makes_the_same_update_as_the_equal_built_in"
    ),
    "TrainingClient.forward_backward_reverse_kl": dict.fromkeys(
        ("data", "reference_model_path", "temperature"), DISTILLED
    ),
    "TrainingClient.optim_step": {"adam_params": CHANGES},
    "TrainingClient.save_state": dict(NAMED),
    "TrainingClient.load_state": {"path": STATE},
    "TrainingClient.load_state_with_optimizer": {"path": STATE},
    "TrainingClient.save_weights_for_sampler": {
        **dict.fromkeys(
            ("name", "ttl_seconds", "user_metadata"),
            "client/test_training.py::test_saving_and_loading_say_what_was_asked_for",
        ),
        "overwrite": "client/test_training.py::test_a_name_is_honoured_and_may_be_used_again",
    },
    "TrainingClient.save_weights_and_get_sampling_client": {
        "name": CLIENT + "test_the_sampler_is_frozen_named_or_not"
    },
    "TrainingClient.create_sampling_client": {"model_path": STATE},
    "SamplingClient.sample": {
        "prompt": CHANGES,
        "num_samples": CHANGES,
        "sampling_params": CHANGES,
        "include_prompt_logprobs": CHANGES,
        **dict.fromkeys(
            (
                "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
                "prompt_logprobs_last_n",
            ),
            CHANGES,
        ),
    },
    "SamplingClient.compute_logprobs": {
        "prompt": "client/test_sampling.py::test_compute_logprobs_scores_the_prompt",
        "prompt_logprobs_last_n": "client/test_sampling.py::test_compute_logprobs_scores_the_prompt",
    },
    "RestClient.__init__": {**ADDRESS, "connection": REST},
    "RestClient.list_training_runs": {
        **LISTED,
        "access_scope": PUBLISHED,
        "project_id": refused(FUZZ + "test_what_the_server_does_not_have_is_refused_by_name"),
    },
    "RestClient.get_training_run": {"training_run_id": REST, "access_scope": PUBLISHED},
    "RestClient.get_training_run_by_tinker_path": {"tinker_path": REST, "access_scope": PUBLISHED},
    "RestClient.list_checkpoints": {"training_run_id": REST},
    "RestClient.list_user_checkpoints": dict(LISTED),
    "RestClient.get_weights_info_by_tinker_path": BY_PATH,
    "RestClient.delete_checkpoint": {"training_run_id": REST, "checkpoint_id": REST},
    "RestClient.delete_checkpoint_from_tinker_path": BY_PATH,
    "RestClient.publish_checkpoint_from_tinker_path": BY_PATH,
    "RestClient.unpublish_checkpoint_from_tinker_path": BY_PATH,
    "RestClient.set_checkpoint_ttl_from_tinker_path": {"tinker_path": REST, "ttl_seconds": REST},
    "RestClient.interpolate_checkpoints": dict.fromkeys(
        ("source_paths", "coefficients", "name"), CLIENT + "test_checkpoints_are_interpolated"
    ),
    "RestClient.get_checkpoint_archive_url": {"training_run_id": REST, "checkpoint_id": REST},
    "RestClient.get_checkpoint_archive_url_from_tinker_path": BY_PATH,
    "RestClient.list_sessions": {
        **LISTED,
        "access_scope": ADMIN,
    },
    "RestClient.get_session": {
        "session_id": REST,
        "access_scope": inert("One may see a session or not, under either word: only administrators see others'."),
    },
    "RestClient.get_sampler": {"sampler_id": REST},
    "RestClient.get_usage": dict.fromkeys(("key", "run", "since"), USAGE),
}  # fmt: skip

TABLE: dict[str, dict[str, dict[str, Entry]]] = {
    "Requests with a JSON body": REQUESTS,
    "Training data and samples on the wire": WIRE,
    "Query parameters": QUERIES,
    "The OpenAI-compatible routes": OPENAI_REQUESTS,
    "Parameter types": TYPES,
    "The clients": CLIENT_CALLS,
}
