"""Every id of the contract that this release keeps has a test named after it, and every option one for its effect."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from reflex_runtime.config import FeedsConfig, LLMServeConfig, ServeConfig

TESTS = Path(__file__).parent.parent
IDS = [
    *(f"B{i}" for i in range(1, 25)),
    *(f"H{i}" for i in range(1, 15)),
    *(f"E{i}" for i in range(1, 5)),
    *(f"V{i}" for i in range(1, 14)),
    *(f"T{i}" for i in range(1, 8)),
    *(f"F{i}" for i in range(1, 15)),
    *(f"G{i}" for i in range(1, 16)),
    *(f"L{i}" for i in range(1, 11)),
]

# Where each option is shown to do something, against a running server unless it is about starting one.
EFFECT = {
    "max_batch_cost_ms": "test_b4_the_budget_is_a_ceiling_on_measured_time",
    "batch_timeout_ms": "test_h10_batch_timeout_holds_for_callers_that_come_back",
    "max_queue": "test_b13_a_full_queue_refuses_with_exactly_these_values",
    "max_queue_s": "test_b13_max_queue_s_bounds_the_predicted_time_that_waits",
    "max_batch_size": "test_h10_max_batch_size_bounds_a_batch",
    "cost_model": "test_b8_the_median_alone_does_not_learn_what_company_costs",
    "max_batch": "test_b12_max_batch_is_ignored_and_warns_once",
    "latest_only": "test_b22_a_newer_request_of_a_robot_replaces_its_waiting_one",
    "max_in_flight_per_client": "test_b21_a_client_at_its_cap_is_429",
    "cuda_graphs": "test_b24_graphs_cannot_be_captured_on_the_cpu",
    "provider": "test_h10_the_provider_is_the_one_onnx_runtime_is_asked_for",
    "threads": "test_h10_threads_are_onnx_runtimes",
    "prefix_max_age_chunks": "test_e1_prefix_max_age_chunks_allows_so_many_blind_chunks",
    "prefix_cache_mb": "test_h10_prefix_cache_mb_bounds_what_is_kept",
    "on_bad_action": "test_e3_on_bad_action_hold_repeats_the_episodes_last_good_action",
    "deadline_ms": "test_b17_deadline_ms_is_the_limit_of_requests_that_bring_none",
    "max_concurrent": "test_h8_beyond_max_concurrent_is_429_and_health_is_exempt",
    "max_body_bytes": "test_h4_a_body_over_the_limit_is_413",
    "max_bodies_mb": "test_h4_bodies_over_max_bodies_mb_in_all_are_503_and_taken_again_once_there_is_room",
    "max_connections": "test_h10_max_connections_refuses_a_newcomer_only_when_all_are_being_answered",
    "idle_timeout_s": "test_h10_idle_timeout_s_closes_without_a_word",
    "head_timeout_s": "test_h10_head_timeout_s_ends_half_a_head",
    "body_timeout_s": "test_h10_body_timeout_s_ends_half_a_body",
    "supervise": "test_b19_a_crash_in_native_code_is_told_at_once_and_the_server_comes_back",
    "watchdog_s": "test_b19_a_lost_device_thread_is_replaced_once_then_the_process_exits_1",
    "max_consecutive_crashes": "test_h6_after_so_many_crashed_batches_in_a_row_it_is_degraded",
    "probe_cooldown_s": "test_h6_a_probe_finds_out_that_it_works_again",
    "slo": "test_h9_log_only_says_it_and_serves_on",
    "slo_mode": "test_h9_mode_degrade_shrinks_batches",
    "drain_timeout_s": "test_b20_when_the_time_is_over_the_rest_is_answered",
    "host": "test_h11_binding_elsewhere_without_a_key_warns",
    "port": "test_h11_a_port_in_use_is_one_line",
    "api_key": "test_h5_a_key_guards_everything_but_health_and_metrics",
    "api_key_file": "test_h5_the_key_may_stand_in_a_file",
    "allow_host": "test_h5_allow_host_names_what_else_it_is_called",
    "robot_id": "test_h10_the_provider_in_force_is_shown",
    "trace": "test_the_trace_of_a_run_is_whole",
    "policy_a": "test_v1_two_policies_come_together_and_the_positional_agrees",
    "policy_b": "test_v5_each_slot_answers_as_its_export_does_by_itself",
    "split": "test_v2_an_episode_is_where_its_bucket_says",
    "shadow_policy": "test_v10_divergence_is_nothing_against_itself_and_something_against_another",
    "shadow_sample": "test_v10_the_sampled_share_is_asked_and_no_other",
    "ramp": "test_v12_a_ramp_advances_by_itself_and_finishes",
    "ramp_every": "test_v12_a_ramp_advances_by_itself_and_finishes",
    "guard": "test_v12_a_guard_that_trips_takes_everything_back_and_says_why",
    "ramp_evidence": "test_v12_evidence_is_waited_for_and_told",
    "ramp_margin": "test_v12_ramp_margin_is_how_much_worse_b_may_be",
    "rtc": "test_e2_the_next_chunk_continues_the_last_and_the_answer_says_how",
    "rtc_per_episode": "test_e2_two_slots_keep_their_own_tails_and_a_moved_episode_begins_anew",
    "rtc_schedule": "test_e2_the_next_chunk_continues_the_last_and_the_answer_says_how",
    "rtc_horizon": "test_e2_another_horizon_gives_another_chunk",
    "adaptive_steps": "test_e3_adaptive_steps_stop_where_the_velocity_is_steady",
    "record": "test_t1_the_file_is_opened_at_the_first_request_and_named_after_it",
    "record_images": "test_t3_images_as_sent_as_hashes_or_not_at_all",
    "record_no_gzip": "test_t1_the_file_is_opened_at_the_first_request_and_named_after_it",
    "record_max_mb": "test_t3_record_max_mb_bounds_a_file",
    "inject_latency_ms": "test_e4_start_up_health_and_answers_say_that_it_is_on",
    "inject_fault": "test_e4_raise_and_nan_strike_a_share_of_requests_and_the_same_ones_again",
}

# The same of `reflex feeds`, each against a run of the command.
FEEDS_EFFECT = {
    "processor": "test_f14_processor_is_imported_from_beside_you_and_answers",
    "onnx": "test_f14_onnx_runs_a_model_and_score_says_what_is_left_out",
    "score": "test_f14_onnx_runs_a_model_and_score_says_what_is_left_out",
    "provider": "test_f14_provider_is_the_one_onnx_runtime_is_asked_for",
    "threads": "test_f14_threads_are_onnx_runtimes_own",
    "startup_timeout_s": "test_f14_startup_timeout_s_bounds_the_start_of_the_processor",
    "max_batch_size": "test_f14_max_batch_size_bounds_a_call",
    "max_latency_ms": "test_f14_max_latency_ms_lets_files_that_are_due_share_calls",
    "queue_capacity": "test_f14_queue_capacity_bounds_what_waits_and_cameras_hear_of_it",
    "response_timeout_s": "test_f14_response_timeout_s_is_what_a_feed_waits",
    "watchdog_s": "test_f14_watchdog_s_says_that_a_batch_hangs_and_releases_its_feeds",
    "realtime": "test_f14_realtime_plays_a_file_as_a_camera_sends_it",
    "loop": "test_f14_loop_starts_a_file_over",
    "max_age_ms": "test_f14_max_age_ms_drops_what_is_too_old_to_be_worth_it",
    "restarts": "test_f14_restarts_is_how_often_a_camera_is_tried_again",
    "read_timeout_s": "test_f14_read_timeout_s_is_how_long_a_camera_may_be_silent",
    "duration_s": "test_f14_duration_s_ends_it",
    "results": "test_f14_results_go_to_a_file_which_is_written_anew_or_to_standard_output",
    "annotate": "test_f14_annotate_and_trace_write_where_they_were_told",
    "trace": "test_f14_annotate_and_trace_write_where_they_were_told",
    "table": "test_f14_table_is_forced_or_forbidden",
    "port": "test_f14_port_and_host_are_where_metrics_and_health_answer",
    "host": "test_f14_port_and_host_are_where_metrics_and_health_answer",
}

# The same of `reflex serve MODEL_DIR`.
LLM_EFFECT = {
    "served_model_name": "test_h10_the_served_name_is_the_directorys_unless_said",
    "device": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "runner": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "dtype": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "threads": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "workers": "test_h10_workers_run_the_model_with_the_same_settings",
    "max_model_len": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "block_size": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "kv_cache_gb": "test_h10_what_is_said_of_the_model_goes_to_its_loader",
    "max_num_batched_tokens": "test_h10_max_num_batched_tokens_bounds_a_step",
    "max_num_seqs": "test_h10_max_num_seqs_bounds_who_is_generated_at_a_time",
    "long_prefill_token_threshold": "test_h10_long_prefill_token_threshold_bounds_a_prompts_part_of_a_step",
    "prefix_caching": "test_h10_no_prefix_caching_computes_prompts_again",
    "max_queue": "test_l9_a_full_queue_is_429_with_a_hint_when_to_come_again",
    "max_queued_tokens": "test_h10_max_queued_tokens_bounds_the_prompts_that_wait",
    "max_body_bytes": "test_l9_a_body_over_the_limit_is_413_announced_or_not",
    "max_bodies_mb": "test_l9_bodies_over_max_bodies_mb_in_all_are_503_and_a_prompt_is_let_go_once_it_is_queued",
    "max_connections": "test_l9_max_connections_is_kept_by_closing_the_one_idle_for_longest",
    "idle_timeout_s": "test_l9_half_requests_are_ended_in_the_form_of_the_api",
    "head_timeout_s": "test_l9_half_requests_are_ended_in_the_form_of_the_api",
    "body_timeout_s": "test_l9_half_requests_are_ended_in_the_form_of_the_api",
    "supervise": "test_b19_a_model_server_that_crashes_comes_back_and_its_callers_are_told_in_the_apis_form",
    "watchdog_s": "test_b19_a_step_that_hangs_is_answered_and_what_waits_runs_once_it_is_back",
    "drain_timeout_s": "test_b20_when_the_time_is_over_streams_end_with_an_error",
    "host": "test_h11_a_model_reachable_from_outside_without_a_key_warns",
    "port": "test_h11_a_port_in_use_is_one_line_for_a_model_too",
    "api_key": "test_h5_a_key_guards_everything_but_health_and_metrics_of_a_model",
    "api_key_file": "test_h5_the_key_may_stand_in_a_file",
    "allow_host": "test_h5_allow_host_names_what_else_it_is_called",
    "trace": "test_h10_trace_writes_every_step",
}


@pytest.fixture(scope="module")
def names() -> set[str]:
    found: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        found.update(re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    return found


@pytest.mark.parametrize("rule", IDS)
def test_every_rule_has_a_test(rule: str, names: set[str]) -> None:
    assert any(name.startswith(f"test_{rule.lower()}_") for name in names)


def test_h10_every_option_has_an_effect_that_a_test_shows(names: set[str]) -> None:
    assert set(EFFECT) == {field.name for field in fields(ServeConfig)}
    assert set(EFFECT.values()) <= names


def test_f14_every_option_of_feeds_has_an_effect_that_a_test_shows(names: set[str]) -> None:
    assert set(FEEDS_EFFECT) == {field.name for field in fields(FeedsConfig)}
    assert set(FEEDS_EFFECT.values()) <= names


def test_l9_every_option_of_a_model_has_an_effect_that_a_test_shows(names: set[str]) -> None:
    assert set(LLM_EFFECT) == {field.name for field in fields(LLMServeConfig)}
    assert set(LLM_EFFECT.values()) <= names
