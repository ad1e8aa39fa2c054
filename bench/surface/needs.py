"""Every name of vLLM that the connector touches, file by file.

Two kinds: hooks, which vLLM calls and we override, so that our parameters must be
vLLM's; and uses, which we call or read. tests/connector/test_surface.py holds them
against the sources of supported versions.
"""

from __future__ import annotations

_CORE = "vllm/v1/core/"
_KV = "vllm/distributed/kv_transfer/kv_connector/"
_BASE = _KV + "v1/base.py"
_STATS = _KV + "v1/metrics.py"

#: "file::Class" -> methods of ours that vLLM calls with its own arguments.
HOOKS: dict[str, tuple[str, ...]] = {
    _BASE + "::KVConnectorBase_V1": (
        "__init__",
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "reset_cache",
        "shutdown",
        "get_kv_connector_stats",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "bind_kv_cache_manager",
        "requires_kv_delivery",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        *("register_kv_caches", "handle_preemptions", "get_transfer_results"),
        *("build_connector_worker_meta", "update_connector_output"),
        *("get_required_kvcache_layout", "has_pending_push_work"),
    ),
    _CORE + "sched/scheduler.py::Scheduler": (
        *("get_kv_cache_usage", "make_stats", "update_from_output"),
    ),
    _BASE + "::SupportsHMA": ("request_finished_all_groups",),
    _STATS + "::KVConnectorStats": ("reset", "aggregate", "reduce", "is_empty"),
    _STATS + "::KVConnectorPromMetrics": ("__init__", "observe"),
    _CORE + "sched/request_queue.py::RequestQueue": (
        "add_request",
        "peek_request",
        "pop_request",
        "prepend_request",
        "prepend_requests",
        "remove_request",
        "remove_requests",
        "__bool__",
        "__len__",
        "__iter__",
    ),
}

#: "file::Class" -> what we call or read, with the parameters that we name.
USES: dict[str, tuple[str, ...]] = {
    _CORE + "sched/scheduler.py::Scheduler": (
        "add_request(request)",
        "schedule()",
        *("waiting", "running", "requests", "connector", "kv_cache_manager"),
        *("defer_block_free", "deferred_frees", "_inflight_prefills"),
        *("set_pause_state(pause_state)", "pause_state"),
    ),
    _CORE + "sched/interface.py::PauseState": ("UNPAUSED", "PAUSED_ALL"),
    _CORE + "sched/async_scheduler.py::AsyncScheduler": ("schedule()", "waiting"),
    _CORE + "kv_cache_manager.py::KVCacheManager": (
        "allocate_slots(request, num_new_tokens, num_new_computed_tokens, "
        "num_lookahead_tokens, full_sequence_must_fit, reserved_blocks, "
        "has_scheduled_reqs)",
        "reset_prefix_cache()",
        *("get_block_ids(request_id)", "get_blocks(request_id)"),
        *("block_pool", "kv_cache_config", "watermark_blocks", "coordinator"),
        *("use_eagle", "max_model_len"),
    ),
    _CORE + "kv_cache_coordinator.py::KVCacheCoordinator": (
        "find_longest_cache_hit(block_hashes, max_cache_hit_length)",
        "single_type_managers",
    ),
    _CORE + "block_pool.py::BlockPool": (
        "touch(blocks)",
        "free_blocks(ordered_blocks)",
        "get_num_free_blocks()",
        "get_new_blocks(num_blocks)",
        *("blocks", "null_block", "num_gpu_blocks", "hash_block_size"),
        "_insert_block_hash(block_hash_with_group_id, block, num_tokens)",
        *("cached_block_hash_to_block", "cached_block_hashes_by_block"),
    ),
    "vllm/v1/kv_cache_interface.py::KVCacheConfig": (
        *("num_blocks", "kv_cache_groups", "kv_cache_tensors"),
    ),
    "vllm/v1/kv_cache_interface.py::KVCacheTensor": ("size",),
    "vllm/v1/kv_cache_interface.py::MambaSpec": (
        *(
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
        ),
    ),
    _CORE + "single_type_kv_cache_manager.py::SingleTypeKVCacheManager": (
        *("block_size", "kv_cache_spec", "max_admission_blocks_per_request"),
    ),
    _CORE + "kv_cache_utils.py::KVCacheBlock": (
        *("block_id", "ref_cnt", "block_hash", "is_null", "block_hash_num_tokens"),
    ),
    "vllm/v1/request.py::Request": (
        *("request_id", "num_tokens", "num_prompt_tokens", "num_output_tokens"),
        *("num_computed_tokens", "all_token_ids", "output_token_ids"),
        *(
            "block_hashes",
            "kv_transfer_params",
            "ec_transfer_params",
            "sampling_params",
            "cache_salt",
        ),
        *("session_id", "priority", "status", "arrival_time", "resumable"),
        *("skip_reading_prefix_cache", "pooling_params"),
    ),
    "vllm/v1/request.py::RequestStatus": (
        *("RUNNING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"),
        *("FINISHED_REPETITION", "FINISHED_ABORTED"),
    ),
    "vllm/sampling_params.py::SamplingParams": ("stop", "skip_special_tokens"),
    _KV + "factory.py::KVConnectorFactory": (
        "register_connector(name, module_path, class_name)",
    ),
    "vllm/engine/arg_utils.py::EngineArgs": (
        *("create_engine_config()", "kv_transfer_config", "kv_offloading_size"),
        *("disable_log_stats", "enable_mm_embeds"),
    ),
    "vllm/config/vllm.py::VllmConfig": (
        *("kv_transfer_config", "ec_transfer_config", "kv_events_config"),
        *("lora_config", "max_in_flight_tokens", "num_prefill_lookahead_tokens"),
    ),
    "vllm/config/parallel.py::ParallelConfig": (
        *("_api_process_rank", "nnodes", "distributed_executor_backend"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
        *("data_parallel_size", "data_parallel_size_local"),
        "data_parallel_external_lb",
    ),
    "vllm/config/kv_events.py::KVEventsConfig": ("enable_kv_cache_events",),
    "vllm/config/multimodal.py::MultiModalConfig": (
        *("enable_mm_embeds", "allow_missing_mm_embeddings"),
    ),
    "vllm/config/scheduler.py::SchedulerConfig": (
        *("policy", "async_scheduling", "scheduler_cls", "get_scheduler_cls()"),
    ),
    "vllm/config/cache.py::CacheConfig": ("enable_prefix_caching",),
    "vllm/config/kv_transfer.py::KVTransferConfig": (
        *("kv_connector", "kv_connector_extra_config", "kv_role"),
        "kv_load_failure_policy",
    ),
    "vllm/config/model.py::ModelConfig": (
        *("skip_tokenizer_init", "multimodal_config", "enable_prompt_embeds"),
        *("runner_type", "has_inner_state"),
    ),
    "vllm/tool_parsers/abstract_tool_parser.py::ToolParserManager": (
        "get_tool_parser(name)",
    ),
}
