"""``HiddenStatesConnector``: vLLM's calls, handed to the scheduler half or the worker half.

vLLM builds this class twice, in the scheduler's process and in every worker; the two share nothing.
"""

# vLLM names the arguments; which of them we need is our affair.
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
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from hsx_dist.connector.connector_config import ConnectorConfig, read_connector_config
from hsx_dist.connector.engine_checks import check_engine
from hsx_dist.connector.metadata import StepMetadata
from hsx_dist.connector.object_writer import store_outlet
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.ranks import RankComparison, Ranks, check_parallelism, check_siblings, ranks_of
from hsx_dist.connector.scheduler import SchedulerHalf
from hsx_dist.connector.stats import HiddenStatesPromMetrics, HiddenStatesStats
from hsx_dist.connector.versions import check_version, layers_first
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.memory import huge_pages
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Increments
from hsx_dist.transport.attach import AttachedEnd
from hsx_dist.transport.local_end import registered
from hsx_dist.vllm_patches import captures, resets
from hsx_dist.vllm_patches.cache_writes import watch
from hsx_dist.vllm_patches.loads import Loads, loaded_tokens, warn_of_loads
from hsx_dist.vllm_patches.no_drafts import never_draft, uses_v1_runner

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = get_logger(__name__)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Ships the hidden states that ``extract_hidden_states`` caches, in ``kv_transfer_config``:
    ``{"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {...}}``
    (keys: ``ConnectorConfig``)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        check_version(VLLM_VERSION)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_connector_config(self._kv_transfer_config.kv_connector_extra_config)
        check_parallelism(vllm_config.parallel_config)
        self._layer_ids = check_engine(vllm_config)
        self._group = hidden_state_group(kv_cache_config, vllm_config.model_config.model)
        spec = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec
        self._block_size = spec.block_size
        self._scheduler: SchedulerHalf | None = None
        self._loads = Loads()
        self._ranks: Ranks | None = None
        self._agreement: RankComparison | None = None
        self._worker: WorkerHalf | None = None  # only on ranks that store
        self._outlet: Outlet | None = None
        self._increments: Increments | None = None
        if role == KVConnectorRole.SCHEDULER:
            resets.install(pending_of)
            self._scheduler = SchedulerHalf(
                self._settings,
                block_size=self._block_size,
                tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
                layer_ids=self._layer_ids,
                dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
                hidden_size=vllm_config.model_config.get_hidden_size(),
            )
            model = vllm_config.model_config
            token_bytes = len(self._layer_ids) * model.get_hidden_size() * model.dtype.itemsize
            warn_of_long_samples(self._settings, model.max_model_len, token_bytes)

        warn_of_short_limits(self._settings, vllm_config, role)

    # -- the scheduler's process ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.new_request(request)
        if uses_v1_runner(self._vllm_config):
            never_draft(request)

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
        self._loads.reset()  # of requests that did not get their blocks
        return self._scheduler.build_meta(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
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
        """A request that is preempted at its very end is computed again: else we were handed blocks that are free. vLLM
        asks the configured role instead; ours always produces."""
        return True

    # -- every worker rank ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise ConfigError(f"expected one hidden-state cache layer, found {len(layers)}: {sorted(layers)}")
        cache = kv_caches[next(iter(layers))]
        cache = layers_first(cache, len(self._layer_ids), self._block_size, VLLM_VERSION)
        if not cache.is_cuda:
            storage = cache.untyped_storage()
            huge_pages.advise(storage.data_ptr(), storage.nbytes())
        group = get_tp_group()
        others = [c for c in getattr(get_kv_transfer_group(), "sub_connectors", ()) if c is not self]
        if group.rank_in_group == 0:
            warn_of_loads(others)
        if group.world_size > 1:
            check_siblings(others, group.world_size)
            self._agreement = RankComparison(
                cache, group.cpu_group, layer_ids=self._layer_ids, model=self._vllm_config.model_config.model
            )
        captures.check_layer_zero(
            self._layer_ids,
            self._vllm_config.compilation_config.static_forward_context.values(),
            self._vllm_config.model_config.model,
        )
        watch(
            next(iter(layers.values())),
            cache,
            self._layer_ids,
            self._vllm_config,
            direct=self._settings.cache_writes == "direct",
            others=[type(c).__name__ for c in others],
        )
        settings = self._settings
        self._ranks = ranks_of(group, one_node=settings.one_node, limit=settings.owners)
        if settings.transport == "attach":
            # A process that vLLM made, and in which nobody has told our lines where to go and what to say of it.
            about = {"run": settings.output, "replica": settings.replica or "", "rank": str(self._ranks.rank)}
            configure_logging(logging.INFO, **about)
        if not self._ranks.stores:
            return
        self._outlet = make_outlet(self._settings, self._vllm_config)
        self._increments = Increments(self._outlet.meter)
        self._worker = WorkerHalf(
            cache,
            self._outlet,
            layer_ids=self._layer_ids,
            page_bytes=self._settings.page_bytes,
            # Where every sample is an object of its own, it is one segment however long it is.
            segment_bytes=self._settings.segment_bytes if self._settings.layout == "part" else sys.maxsize,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the model runs; ``start_load_kv`` comes after it where nothing is to be loaded."""
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
        pass  # vLLM's cache-only layer has written the states; they are read when the request has ended

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done: set[str] = set()
        if self.has_connector_metadata():
            meta = self._get_connector_metadata()
            assert isinstance(meta, StepMetadata)
            assert self._ranks is not None
            if self._agreement is not None:
                self._agreement.check(meta.saves)
            done = self._ranks.others(meta)
            if self._worker is not None:
                self._worker.step(self._ranks.own(meta))
        if self._worker is not None:
            done |= self._worker.finished()
        return done or None, None

    @property
    def pending(self) -> int:
        """Requests whose states this half has not passed on yet (worker half: or not stored yet, where it stores)."""
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
        end = time.monotonic() + self._settings.drain_seconds
        left = self._worker.drain(self._settings.drain_seconds)
        self._worker.close()
        if left:
            log.error(
                "the engine ends with %d requests whose hidden states were not copied within %g s (drain_seconds)",
                left,
                self._settings.drain_seconds,
            )
        if self._settings.bare or self._settings.transport == "attach":  # else its owner closes it
            self._outlet.close(max(end - time.monotonic(), 0.1))


def warn_of_long_samples(settings: ConnectorConfig, longest: int, token_bytes: int) -> None:
    """Log a warning if the states of one request can exceed what a bare connector's writers hold encoded."""
    if settings.bare and longest * token_bytes > settings.encoded_bytes:
        log.warning(
            "a request of max_model_len=%d tokens has %d bytes of states, and in_flight_bytes=%d allows %d encoded "
            "bytes: the writers of each worker hold one such request whole, beyond in_flight_bytes. Provide memory, "
            "raise in_flight_bytes, or lower --max-model-len",
            longest,
            longest * token_bytes,
            settings.in_flight_bytes,
            settings.encoded_bytes,
        )


def warn_of_short_limits(settings: ConnectorConfig, vllm_config: VllmConfig, role: KVConnectorRole) -> None:
    """Say which of the engine's own limits would cut off what the connector is still doing at its end.

    Raises:
        ConfigError: the drafter would skip states of long sequences.
    """
    import vllm.envs as envs

    if role != KVConnectorRole.SCHEDULER:
        return
    spec = vllm_config.speculative_config
    drafter = getattr(getattr(spec, "draft_model_config", None), "max_model_len", None)
    longest = vllm_config.model_config.max_model_len
    if drafter is not None and drafter < longest:
        # vLLM then writes no states for a whole batch, whenever its longest sequence exceeds the drafter's limit.
        raise ConfigError(
            f"expected a drafter that takes sequences as long as the model's ({longest} tokens), came {drafter}: "
            "states of longer ones would be missing; do not set speculative_config's max_model_len, or lower the "
            "model's"
        )
    if not settings.bare:
        return
    if vllm_config.shutdown_timeout < settings.drain_seconds:
        log.warning(
            "shutdown_timeout is %g s, less than drain_seconds (%g): a stopped engine ends requests at once, and may "
            "end before all hidden states are stored; start a server with --shutdown-timeout %d or more, flush an LLM "
            "of your own (hsx_dist.connector.flush) before it goes",
            vllm_config.shutdown_timeout,
            settings.drain_seconds,
            int(settings.drain_seconds) + 10,
        )
    if settings.drain_seconds > envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS:
        log.warning(
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS is %g, less than drain_seconds (%g): workers may be ended before all "
            "hidden states are stored; raise it",
            envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS,
            settings.drain_seconds,
        )


def hidden_state_group(kv_cache_config: KVCacheConfig, model: str = "this model") -> int:
    """Index of the cache group that holds the hidden states, found by its spec.

    Raises:
        ConfigError: the model's cache does not keep them in a group of their own kind.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0  # one uniform group holds everything (MLA models)
    kinds = [type(g.kv_cache_spec).__name__ for g in groups]
    raise ConfigError(
        f"{model}: expected one hidden-state cache group, found {len(found)} among {kinds}: its cache has a form whose "
        "hidden states cannot be told from its keys and values; this model is not supported"
    )


def make_outlet(settings: ConnectorConfig, vllm_config: VllmConfig) -> Outlet:
    """Where this rank's pages go; called once the worker is set up."""
    if settings.address is None:
        return store_outlet(settings, vllm_config)
    if settings.transport == "inline":
        return Outlet(registered(settings.address))
    if settings.authkey is None:
        raise ConfigError("hsx.authkey: expected the key of the process at hsx.address, got none. Set it")
    key = bytes.fromhex(settings.authkey.get_secret_value())
    return Outlet(AttachedEnd(settings.address, key, settings.in_flight_bytes))


def pending_of(connector: Any) -> int:
    """Requests that one connector, ours or vLLM's ``MultiConnector`` of ours, has not passed on yet."""
    children = getattr(connector, "sub_connectors", [connector])  # vLLM's MultiConnector
    return sum(c.pending for c in children if isinstance(c, HiddenStatesConnector))
