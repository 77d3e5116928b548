"""Tensor-parallel ranks: selection of the ranks that store samples, and the check that all hold the same states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.page import HIDDEN_STATES

log = get_logger(__name__)

#: Number of rows of one request that ``RankComparison`` compares in each layer.
COMPARED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Ranks:
    """This worker's rank, and the ranks that store samples, in ascending order."""

    rank: int
    owners: tuple[int, ...]
    #: For each captured point that is sharded over ranks: this rank's part, or None (``CapturedPoint.shard``).
    shards: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def stores(self) -> bool:
        """Whether this rank stores anything: it owns requests, or has parts of rows that no other rank has."""
        return self.rank in self.owners or any(shard is not None for shard in self.shards.values())

    def owns(self, request: Save | Skip | Expect) -> bool:
        """Whether this rank stores, marks or expects the request's sample. True on exactly one rank."""
        return self.owners[request.owner % len(self.owners)] == self.rank

    def own(self, step: Step) -> Step:
        """Return the part of a step that concerns this rank's requests."""
        if self.owners == (self.rank,) and not self.shards:
            return step
        return Step(
            saves=[own for s in step.saves if (own := self._own_columns(s)) is not None],
            skipped=[s for s in step.skipped if self.owns(s)],
            expected=[e for e in step.expected if self.owns(e)],
            idle=step.idle,
        )

    def _own_columns(self, save: Save) -> Save | None:
        """Return ``save`` with the columns that this rank copies; None if there are none.

        The owner copies columns that are not sharded. The rank that has a shard copies it.
        """
        owns = self.owns(save)
        own = tuple(
            i
            for i, column in enumerate(save.columns)
            if (owns if column.shards == 1 else self.shards.get(column.point) == column.shard)
        )
        if len(own) == len(save.columns):
            return save
        return replace(save, copied=own) if own else None

    def others(self, step: Step) -> set[str]:
        """Return vLLM's ids of the saved requests of which this rank copies nothing.

        vLLM frees a request's blocks when every rank has reported it. A rank that copies nothing reports it in the step
        in which it gets the save.
        """
        return {s.request_id for s in step.saves if self._own_columns(s) is None}


def ranks_of(group: Any, *, one_node: bool, limit: int | None, points: Sequence[CapturedPoint] = ()) -> Ranks:
    """Build the ``Ranks`` of vLLM's tensor-parallel ``group`` (a ``GroupCoordinator``). Collective: every rank calls
    it.

    Args:
        one_node: only ranks on the node of rank 0 store: a local path, or a process to connect to, exists on one node.
        limit: at most this many ranks own samples; None: no limit. Ranks with shards store their shards regardless.
        points: the points that this rank captures.

    Raises:
        ConfigError: this rank has a shard, and its node cannot store.
    """
    owners = list(range(group.world_size))
    if one_node and len(owners) > 1:
        # Tests for shared memory, which works for every executor. `nnodes` stays 1 under Ray.
        from vllm.distributed.parallel_state import in_the_same_node_as

        same = in_the_same_node_as(group.cpu_group, source_rank=0)
        owners = [rank for rank in owners if same[rank]]
    shards = {point.name: point.shard for point in points if point.shards > 1}
    if group.rank_in_group not in owners and any(shard is not None for shard in shards.values()):
        raise ConfigError(
            f"capture: expected all {group.world_size} tensor-parallel ranks on one node, since each stores its shard "
            f"of {', '.join(shards)}, got some on other nodes. Lower tensor_parallel_size, or omit these points"
        )
    return Ranks(group.rank_in_group, tuple(owners[:limit]), shards)


def check_parallelism(parallel_config: Any) -> None:
    """Refuse engines whose workers are not the tensor-parallel ranks of one scheduler.

    Raises:
        ConfigError: prefill context parallelism, or an external launcher with tensor parallelism.
    """
    # Workers of other context-parallel ranks have the same tensor-parallel rank: each sample would be stored twice.
    context = getattr(parallel_config, "prefill_context_parallel_size", 1)
    if context > 1:
        raise ConfigError(
            f"prefill_context_parallel_size: expected 1 with HiddenStatesConnector, got {context}. "
            "Use tensor_parallel_size or data parallelism"
        )
    # Each rank then has a scheduler, which frees blocks by its own worker's reports. The schedulers would diverge.
    if parallel_config.distributed_executor_backend == "external_launcher" and parallel_config.tensor_parallel_size > 1:
        raise ConfigError(
            "distributed_executor_backend: expected mp or ray with HiddenStatesConnector and tensor_parallel_size "
            f"{parallel_config.tensor_parallel_size}, got external_launcher. Remove it"
        )


def check_siblings(connectors: Iterable[Any], world_size: int) -> None:
    """Refuse other connectors in vLLM's ``MultiConnector`` whose reports come from some ranks only.

    vLLM waits for the number of reports that the connectors return, and for all ranks if one returns None, as
    ``HiddenStatesConnector`` does. The reports of the other connectors would never be complete, and vLLM would never
    free the blocks that they hold.

    Args:
        connectors: the instances next to ``HiddenStatesConnector``.

    Raises:
        ConfigError: a connector expects another number of reports than there are ranks.
    """
    for connector in connectors:
        count = connector.get_finished_count()
        if count is not None and count != world_size:
            raise ConfigError(
                f"{type(connector).__name__}.get_finished_count(): expected None or {world_size}, the number of ranks, "
                f"in a MultiConnector with HiddenStatesConnector, got {count}. vLLM would wait for reports that never "
                "arrive. Remove that connector, or set tensor_parallel_size to 1"
            )


class RankComparison:
    """Compares the states of one point on all ranks.

    The states must be the same on all ranks, since only the owner of a request stores its states. Some models capture
    sums that are reduced over ranks later, inside the next norm. Then each rank holds different, wrong numbers.
    """

    def __init__(
        self, cache: torch.Tensor, group: Any, *, layer_ids: Sequence[int], model: str, point: str = HIDDEN_STATES
    ):
        """``cache``: ``[blocks, layers, block_size, hidden]``. ``group``: all ranks, on the CPU (gloo). ``point``: must
        not be sharded, and holds floating-point numbers."""
        self._cache = cache
        self._point = "hidden states" if point == HIDDEN_STATES else point
        self._group = group
        self._layer_ids = layer_ids
        self._model = model
        self._saved = 0
        self._tolerance = tolerance(cache.dtype)

    def check(self, saves: Sequence[Save]) -> None:
        """Compare a few rows of the first of ``saves``, before its states are copied.

        Collective: every rank calls it in each step with the same saves, which the scheduler sends to all. It compares
        at the first save, the second, the fourth and so on. Kernels differ with the batch, so one comparison is not
        enough; the doubling keeps the cost small.

        Raises:
            ConfigError: the ranks differ by more than rounding. All ranks raise it.
        """
        before, self._saved = self._saved, self._saved + len(saves)
        if before.bit_length() == self._saved.bit_length():
            return
        rows = self._rows(saves[0])
        gathered = [torch.empty_like(rows).view(torch.uint8) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, rows.view(torch.uint8), group=self._group)  # gloo does not support every float type
        distances = row_distances(torch.stack([other.view(rows.dtype) for other in gathered]))
        worst = float(distances.max())
        if worst == 0:
            return
        rank, _, layer = (int(i) for i in np.unravel_index(int(distances.argmax()), distances.shape))
        where = f"a distance of {worst:.2g} between ranks 0 and {rank} at layer {self._layer_ids[layer]}"
        if worst > self._tolerance:
            raise ConfigError(
                f"{self._model}: expected the same {self._point} on all {len(gathered)} tensor-parallel ranks, got "
                f"{where}. The model captures sums before they are reduced over ranks. Set tensor_parallel_size to 1, "
                "or use another model"
            )
        log.warning("%s: %s, which is within rounding (%.2g)", self._model, where, self._tolerance)

    def _rows(self, save: Save) -> torch.Tensor:
        """Return rows of the request's tokens, from the first to the last: ``[rows, layers, hidden]`` on the CPU."""
        count = save.mean_of or len(save.token_ids)
        at = np.linspace(0, count - 1, COMPARED_ROWS).astype(np.int64)
        if save.positions is not None:
            at = np.asarray(save.positions)[at]
        block_size = self._cache.shape[2]
        blocks = torch.from_numpy(save.block_ids[at // block_size]).to(self._cache.device)
        slots = torch.from_numpy(at % block_size).to(self._cache.device)
        return self._cache[blocks, :, slots].cpu().contiguous()


def comparisons(caches: Iterable[tuple[CapturedPoint, torch.Tensor]], group: Any, model: str) -> list[RankComparison]:
    """Return a comparison for each point that is not sharded. Omits ids of experts: rounding decides them at a tie."""
    return [
        RankComparison(cache, group, layer_ids=point.layers, model=model, point=point.name)
        for point, cache in caches
        if point.shards == 1 and cache.dtype.is_floating_point
    ]


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest ``row_distances`` that rounding explains.

    vLLM's reductions give all ranks the same bits, so this is a margin. 60 layers summed in bfloat16, by 16 ranks each
    in another order, differ by 1.5 eps. Without the last layer's reduction they differ by 6 eps
    (``test_sums_in_another_order…``). 1e-4 allows for TF32 in float32.
    """
    return max(2 * torch.finfo(dtype).eps, 1e-4)


def row_distances(ranks: torch.Tensor) -> torch.Tensor:
    """Return the distance of each rank's rows from rank 0's: ``[ranks, rows, layers, hidden]`` → float32
    ``[ranks, rows, layers]``.

    The distance is the sum of absolute differences, divided by the sum of rank 0's absolute values. Squares are
    unsuitable: a few channels have much larger values than all others, and would hide the others' differences. Numbers
    that are not finite on rank 0 must be the same on the other ranks; else the distance is infinite.
    """
    ranks = ranks.float()
    first = ranks[:1]
    same = (ranks == first) | (ranks.isnan() & first.isnan())
    apart = torch.where(same, 0.0, (ranks - first).abs()).sum(-1)
    size = first.abs().nan_to_num(0.0, 0.0, 0.0).sum(-1)
    return torch.where(apart == 0, 0.0, apart / size).nan_to_num(torch.inf, torch.inf, torch.inf)
