"""``HiddenStatesConnector``: passes vLLM's calls to the scheduler half or the worker half.

vLLM makes one instance in the scheduler's process and one in every worker. The instances share no state.
"""

# vLLM defines the methods' arguments; not every method needs all of them.
# ruff: noqa: ARG002

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as VLLM_VERSION  # noqa: N812
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.connector_config import ConnectorConfig, read_connector_config
from hsx_dist.connector.engine_checks import check_engine, warn_of_long_samples, warn_of_short_limits
from hsx_dist.connector.metadata import CapturedMetadata, StepMetadata
from hsx_dist.connector.object_writer import store_outlet
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.point_copier import hidden_states_in
from hsx_dist.connector.ranks import (
    RankComparison,
    Ranks,
    check_parallelism,
    check_siblings,
    comparisons,
    ranks_of,
)
from hsx_dist.connector.scheduler import SchedulerHalf
from hsx_dist.connector.stats import HiddenStatesPromMetrics, HiddenStatesStats
from hsx_dist.connector.tapped import TapWatch, captured_points, check_layout
from hsx_dist.connector.versions import check_version, layers_first
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.memory import huge_pages
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Increments
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.transport.attach import AttachedEnd
from hsx_dist.transport.local_end import registered
from hsx_dist.vllm_patches import captures, rejections, resets
from hsx_dist.vllm_patches.cache_writes import watch
from hsx_dist.vllm_patches.loads import Loads, loaded_tokens, warn_of_loads
from hsx_dist.vllm_patches.no_drafts import never_draft, sample_without_drafts, uses_v1_runner
from hsx_dist.vllm_patches.rejections import was_rejected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = get_logger(__name__)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that ships the hidden states that ``extract_hidden_states`` caches, or the points that taps cache
    (``taps.capture_config.additional_config``). Keys of ``kv_connector_extra_config``: ``ConnectorConfig``.

    Example:
        .. code-block:: sh

            vllm serve MODEL \\
              --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
                  "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}}}' \\
              --kv-transfer-config '{"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
                  "kv_connector_extra_config": {"shared_storage_path": "s3://bucket/states"}}'
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        check_version(VLLM_VERSION)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_connector_config(self._kv_transfer_config.kv_connector_extra_config)
        check_parallelism(vllm_config.parallel_config)
        self._layer_ids = check_engine(vllm_config)
        model = vllm_config.model_config
        self._group = hidden_state_group(kv_cache_config, model.model, tapped=self._layer_ids is None)
        spec = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec
        self._block_size = spec.block_size
        self._scheduler: SchedulerHalf | None = None
        self._loads = Loads()
        self._ranks: Ranks | None = None
        self._agreements: list[RankComparison] = []
        self._points: tuple[CapturedPoint, ...] = ()  # this rank's
        self._taps: TapWatch | None = None
        self._worker: WorkerHalf | None = None  # only on ranks that store
        self._outlet: Outlet | None = None
        self._increments: Increments | None = None
        if role == KVConnectorRole.SCHEDULER:
            resets.install(pending_of)
            rejections.install()
            self._scheduler = SchedulerHalf(
                self._settings,
                block_size=self._block_size,
                tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
            )
            if self._layer_ids is not None:
                dtype = str(model.dtype).removeprefix("torch.")
                self._capture((CapturedPoint(HIDDEN_STATES, self._layer_ids, model.get_hidden_size(), dtype),))

        if role == KVConnectorRole.WORKER and self._layer_ids is not None and uses_v1_runner(vllm_config):
            sample_without_drafts()

        if role == KVConnectorRole.SCHEDULER:
            warn_of_short_limits(self._settings, vllm_config)

    def _capture(self, points: tuple[CapturedPoint, ...]) -> None:
        assert self._scheduler is not None
        self._scheduler.capture(points)
        token_bytes = sum(len(p.layers) * p.width * p.shards * getattr(torch, p.dtype).itemsize for p in points)
        warn_of_long_samples(self._settings, self._vllm_config.model_config.max_model_len, token_bytes)

    # -- the scheduler's process ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        if was_rejected(request):
            return
        self._scheduler.new_request(request)
        if self._layer_ids is not None and uses_v1_runner(self._vllm_config):
            never_draft(request)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Set the points that the workers capture by taps. ``metadata``: by rank."""
        if self._layer_ids is not None:
            return  # without taps, the metadata is of another connector in a MultiConnector
        first = metadata.get(0)
        if not isinstance(first, CapturedMetadata):
            raise ConfigError(
                f"expected the workers' captured points, got {type(first).__name__}. vLLM passes on the metadata of "
                "only one connector of a MultiConnector. Put HiddenStatesConnector first"
            )
        self._capture(first.points)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._loads.refuse(request)
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._loads.reset()
        if tokens := loaded_tokens(request):
            self._scheduler.tokens_were_loaded(tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        self._loads.reset()  # also for requests that did not get their blocks
        return self._scheduler.build_meta(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        if was_rejected(request):
            return False, None
        return self._scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # A request that was never scheduled has no blocks at all.
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.copies_done(connector_output.finished_sending or set())

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.holds_blocks

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_news

    def get_finished_count(self) -> int | None:
        return None  # every rank reports each request: vLLM waits for all of them if any connector returns None

    @property
    def requires_kv_delivery(self) -> bool:
        """True, so that vLLM computes a request again that was preempted at its end. Otherwise the connector would get
        freed blocks.

        The base class derives this from ``kv_role`` instead; this connector always produces.
        """
        return True

    # -- every worker rank ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        group = get_tp_group()
        others = [c for c in getattr(get_kv_transfer_group(), "sub_connectors", ()) if c is not self]
        if group.rank_in_group == 0:
            warn_of_loads(others)
        if group.world_size > 1:
            check_siblings(others, group.world_size)
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if self._layer_ids is None:
            caches = self._tapped(layers, kv_caches, group)
        else:
            caches = [self._extracted(layers, kv_caches, self._layer_ids, others)]
        for _, cache in caches:
            if not cache.is_cuda:
                storage = cache.untyped_storage()
                huge_pages.advise(storage.data_ptr(), storage.nbytes())
        self._points = tuple(point for point, _ in caches)
        if group.world_size > 1:
            self._agreements = comparisons(caches, group.cpu_group, self._vllm_config.model_config.model)
        self._open(caches, group)

    def _extracted(
        self,
        layers: Mapping[str, Any],
        kv_caches: dict[str, torch.Tensor],
        layer_ids: tuple[int, ...],
        others: Sequence[Any],
    ) -> tuple[CapturedPoint, torch.Tensor]:
        """Return the point and the cache of vLLM's own extraction."""
        if len(layers) != 1:
            raise ConfigError(
                f"expected one hidden-state cache layer, got {len(layers)}: {sorted(layers)}. Install a tested vLLM "
                "release"
            )
        (name, layer), *_ = layers.items()
        cache = layers_first(kv_caches[name], len(layer_ids), self._block_size, VLLM_VERSION)
        captures.check_layer_zero(
            layer_ids,
            self._vllm_config.compilation_config.static_forward_context.values(),
            self._vllm_config.model_config.model,
        )
        watch(
            layer,
            cache,
            layer_ids,
            self._vllm_config,
            direct=self._settings.cache_writes == "direct",
            others=[type(c).__name__ for c in others],
        )
        return hidden_states_in(cache, layer_ids)

    def _tapped(
        self, layers: Mapping[str, Any], kv_caches: dict[str, torch.Tensor], group: Any
    ) -> list[tuple[CapturedPoint, torch.Tensor]]:
        """Return the points and the caches of the taps."""
        from hsx_dist.taps.point_cache import PointCache

        found = [layer for layer in layers.values() if isinstance(layer, PointCache)]
        if not found:
            raise ConfigError(
                "expected a model with taps, got none. Use load_format auto, and load the plugin of hsx_dist "
                "(VLLM_PLUGINS, if set, must name hsx_dist)"
            )
        views = {
            layer.layer_name: layers_first(
                kv_caches[layer.layer_name], len(layer.layers), self._block_size, VLLM_VERSION
            )
            for layer in found
        }
        kv_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        caches = captured_points(found, views, rank=group.rank_in_group, ranks=group.world_size, kv_heads=kv_heads)
        check_layout([point for point, _ in caches], self._settings)
        self._taps = TapWatch(found[0].taps.check_alive)
        return caches

    def _open(self, caches: list[tuple[CapturedPoint, torch.Tensor]], group: Any) -> None:
        """Make this rank's outlet and worker half, if the rank stores."""
        settings = self._settings
        self._ranks = ranks_of(group, one_node=settings.one_node, limit=settings.owners, points=self._points)
        if settings.transport == "attach":
            # vLLM started this process, so its logging is not configured yet.
            about = {"run": settings.output, "replica": settings.replica or "", "rank": str(self._ranks.rank)}
            configure_logging(logging.INFO, **about)
        if not self._ranks.stores:
            return
        self._outlet = make_outlet(self._settings, self._vllm_config)
        self._increments = Increments(self._outlet.meter)
        self._worker = WorkerHalf(
            caches,
            self._outlet,
            page_bytes=self._settings.page_bytes,
            # With one object per sample, each sample is one segment of any length.
            segment_bytes=self._settings.segment_bytes if self._settings.layout == "part" else sys.maxsize,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._taps is None else CapturedMetadata(self._points)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. vLLM calls this before the model runs.

        If nothing is loaded, vLLM calls ``start_load_kv`` only after the model has run.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, StepMetadata)
            assert self._ranks is not None
            self._worker.begin(self._ranks.own(connector_metadata))

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass  # vLLM's cache-only layer writes the states; they are read after the request ends

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done: set[str] = set()
        if self.has_connector_metadata():
            meta = self._get_connector_metadata()
            assert isinstance(meta, StepMetadata)
            assert self._ranks is not None
            if self._taps is not None:
                self._taps.step(bool(meta.saves))
            for agreement in self._agreements:
                agreement.check(meta.saves)
            done = self._ranks.others(meta)
            if self._worker is not None:
                self._worker.step(self._ranks.own(meta))
        if self._worker is not None:
            done |= self._worker.finished()
        return done or None, None

    @property
    def pending(self) -> int:
        """Number of requests whose states this half has not passed on. A rank that stores adds its unstored samples."""
        if self._scheduler is not None:
            return self._scheduler.pending
        waiting = self._worker.pending if self._worker is not None else 0
        return waiting + (self._outlet.pending if self._outlet is not None else 0)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return HiddenStatesStats.of(self._increments) if self._increments is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return HiddenStatesStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return HiddenStatesPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is None or self._outlet is None:
            return
        if self._taps is not None:
            try:
                self._taps.end()
            except Exception:
                log.exception("the taps failed at the engine's end")
        end = time.monotonic() + self._settings.drain_seconds
        left = self._worker.drain(self._settings.drain_seconds)
        self._worker.close()
        if left:
            log.error(
                "the engine ends with %d requests whose hidden states were not copied within %g s. Raise drain_seconds",
                left,
                self._settings.drain_seconds,
            )
        # The code that registered an inline end closes it.
        if self._settings.bare or self._settings.transport == "attach":
            self._outlet.close(max(end - time.monotonic(), 0.1))


def hidden_state_group(kv_cache_config: KVCacheConfig, model: str = "this model", *, tapped: bool = False) -> int:
    """Return the index of the cache group that holds the hidden states, by its spec.

    ``tapped``: the engine has taps, and one group must hold all points.

    Raises:
        ConfigError: no single group has the spec of hidden states; with taps, there are several groups.
    """
    groups = kv_cache_config.kv_cache_groups
    if tapped:
        if len(groups) != 1:
            raise ConfigError(
                f"{model}: expected one group of cache blocks with capture by taps, got {len(groups)}. Use source: "
                "cache"
            )
        return 0
    found = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0  # one uniform group holds everything (MLA models)
    kinds = [type(g.kv_cache_spec).__name__ for g in groups]
    raise ConfigError(
        f"{model}: expected one hidden-state cache group, got {len(found)} among {kinds}. The connector cannot "
        "distinguish hidden states from keys and values in this cache. Use another model"
    )


def make_outlet(settings: ConnectorConfig, vllm_config: VllmConfig) -> Outlet:
    """Build this rank's outlet. Call it after the worker is set up."""
    if settings.address is None:
        return store_outlet(settings, vllm_config)
    if settings.transport == "inline":
        return Outlet(registered(settings.address))
    if settings.authkey is None:
        raise ConfigError("hsx.authkey: expected the key of the process at hsx.address, got none. Set hsx.authkey")
    key = bytes.fromhex(settings.authkey.get_secret_value())
    return Outlet(AttachedEnd(settings.address, key, settings.in_flight_bytes))


def pending_of(connector: Any) -> int:
    """Return how many requests a ``HiddenStatesConnector``, or those in a ``MultiConnector``, have not passed on."""
    children = getattr(connector, "sub_connectors", [connector])  # vLLM's MultiConnector
    return sum(c.pending for c in children if isinstance(c, HiddenStatesConnector))
