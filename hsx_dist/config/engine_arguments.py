"""Which of vLLM's engine arguments are part of a run's meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Arguments of ``EngineArgs`` that change speed, memory, placement or logs, and at most the rounding of a state.
SPEED_ONLY = frozenset({
    # logs and metrics
    "aggregate_engine_logging", "collect_detailed_traces", "cudagraph_metrics", "disable_log_stats",
    "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "enable_mfu_metrics", "kv_cache_metrics",
    "kv_cache_metrics_sample", "otlp_traces_endpoint", "profiler_config", "ray_workers_use_nsight",
    "served_model_name", "show_hidden_metrics_for_version", "use_tqdm_on_load",
    # access to the weights
    "download_dir", "hf_token", "max_parallel_loading_workers", "pt_load_map_location", "safetensors_load_strategy",
    # placement
    "all2all_backend", "cp_kv_cache_interleave_size", "data_parallel_address", "data_parallel_backend",
    "data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_rank", "data_parallel_rpc_port",
    "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank", "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold", "dcp_comm_backend", "decode_context_parallel_size", "disable_custom_all_reduce",
    "disable_nccl_for_dp_synchronization", "distributed_executor_backend", "distributed_timeout_seconds",
    "enable_dbo", "enable_elastic_ep", "enable_eplb", "enable_expert_parallel", "eplb_config",
    "expert_placement_strategy", "master_addr", "master_port", "nnodes", "node_rank", "numa_bind", "numa_bind_cpus",
    "numa_bind_nodes", "pipeline_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size",
    "ubatch_size",
    # memory
    "block_size", "cpu_offload_gb", "cpu_offload_params", "disable_hybrid_kv_cache_manager", "enable_prefix_caching",
    "enable_sleep_mode", "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_offloading_backend",
    "kv_offloading_size", "limit_mm_per_prompt", "mm_processor_cache_gb", "num_gpu_blocks_override",
    "offload_backend", "offload_group_size", "offload_num_in_group", "offload_params", "offload_prefetch_step",
    "prefix_caching_hash_algo",
    # schedule
    "async_scheduling", "enable_chunked_prefill", "long_prefill_token_threshold", "max_logprobs",
    "max_num_batched_tokens", "max_num_seqs", "scheduler_reserve_full_isl", "scheduling_policy", "shutdown_timeout",
    "stream_interval",
    # kernels
    "attention_backend", "compilation_config", "cudagraph_capture_sizes", "disable_cascade_attn",
    "enable_flashinfer_autotune", "enforce_eager", "linear_backend", "max_cudagraph_capture_size", "moe_backend",
    "optimization_level", "performance_mode"
})  # fmt: skip

#: Those of ``SPEED_ONLY`` that decide which points an engine has: vLLM's MoE kernels return a router's choices or not,
#: and an engine without images embeds tokens itself.
CHOOSE_POINTS = ("limit_mm_per_prompt", "moe_backend")


def trusts_remote_code(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's code may run: only for ``true``, because a text such as ``"false"`` counts as true."""
    return engine_kwargs.get("trust_remote_code") is True


def engine_meaning(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that may change a sample: all except ``SPEED_ONLY``, also unknown ones."""
    return {name: value for name, value in sorted(engine_kwargs.items()) if name not in SPEED_ONLY}
