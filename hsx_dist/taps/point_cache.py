"""The cache-only layer of a point: vLLM allocates it in the same paged blocks as keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport


class TapMetadataBuilder(CacheOnlyAttentionMetadataBuilder):
    """Metadata builder that allows CUDA graphs, unlike vLLM's: a tap reads a persistent buffer of slots in any
    graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class TapBackend(CacheOnlyAttentionBackend):
    """The backend of ``PointCache``."""

    @staticmethod
    def get_name() -> str:
        return "HSX_TAP"

    @staticmethod
    def get_builder_cls() -> type[TapMetadataBuilder]:
        return TapMetadataBuilder


class PointCache(CacheOnlyAttentionLayer):
    """The cache of one point, ``[blocks, layers, block_size, width]``.

    Attributes:
        point: the point's name.
        layers: the model's layers, in the order of the cache's second axis.
        head: length of a head, if a row consists of heads.
        taps: ``install.Installed`` of the model.
    """

    def __init__(
        self,
        vllm_config: Any,
        name: str,
        point: str,
        layers: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        head: int | None,
    ):
        # Points do not have the dtype of keys and values, and vLLM's layer refuses a quantised dtype.
        config = replace(vllm_config.cache_config, cache_dtype="auto")
        with set_current_vllm_config(vllm_config):
            super().__init__(len(layers), width, config, prefix=name)
        self.kv_cache_torch_dtype = dtype
        self.attn_backend = TapBackend
        self.point, self.layers, self.head = point, layers, head
        self.taps: Any = None  # the model's ``Installed``
