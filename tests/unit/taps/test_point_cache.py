"""The cache of a point: the memory that vLLM allocates for it, and whether CUDA graphs are possible."""

from __future__ import annotations

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from hsx_dist.taps.point_cache import PointCache


def test_a_points_cache_has_its_dtype_next_to_quantised_keys_and_allows_full_cuda_graphs() -> None:
    config = VllmConfig(cache_config=CacheConfig(block_size=32, cache_dtype="fp8"))
    cache = PointCache(config, "hsx_taps.100000", "q", (1, 3), 64, torch.bfloat16, 16)
    spec = cache.get_kv_cache_spec(config)
    assert spec is not None
    assert (spec.dtype, spec.num_kv_heads, spec.head_size) == (torch.bfloat16, 2, 64)
    builder = cache.get_attn_backend().get_builder_cls()
    assert builder.get_cudagraph_support(config, spec) is AttentionCGSupport.ALWAYS
