"""Rank and world size of a training process, samples that its ranks may not share, and an epoch for its workers."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.reading.arguments import whole

if TYPE_CHECKING:
    from hsx_dist.reading.select import Selection

log = get_logger(__name__)


class SharedEpoch:
    """The epoch of a data set, in memory that the workers of a ``DataLoader`` share. Not shared without torch."""

    def __init__(self) -> None:
        self._memory: Any = [0, 0]  # the epoch, and whether ``set`` was called
        if importlib.util.find_spec("torch") is not None:
            import torch

            self._memory = torch.zeros(2, dtype=torch.int64).share_memory_()

    def get(self) -> int:
        return int(self._memory[0])

    def asked(self) -> int:
        """The epoch of the last ``set``; 0 if it was never called."""
        return self.get() if self._memory[1] else 0

    def set(self, epoch: int) -> None:
        self._memory[0], self._memory[1] = whole("epoch", epoch), 1

    def load(self, epoch: int) -> None:
        """Set the epoch of a loaded state, if ``set`` was never called.

        ``StatefulDataLoader`` loads states when iteration begins, which is after the trainer's ``set_epoch``.
        """
        if not self._memory[1]:
            self._memory[0] = epoch


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: the arguments, else from torch.distributed, else from the environment (torchrun).

    Raises ``ConfigError`` if only one is given, if one is no integer, or if the rank is not below
    the world size.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank, world_size: expected both or none, got one. Give both")
    if rank is None or world_size is None:
        rank, world_size = _found_world()
    rank, world_size = whole("rank", rank), whole("world_size", world_size)  # states need JSON's types
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 … {world_size - 1} of world_size {world_size}, got {rank}. Correct them")
    return rank, world_size


def warn_if_growing(selection: Selection, world_size: int | None = None) -> None:
    """Log a warning if other ranks may have opened the run with other samples. Ranks cannot see each other's samples.

    ``world_size``: default as in ``world_of``.
    """
    ranks = _found_world()[1] if world_size is None else world_size
    if ranks > 1 and not selection.by_keys and not selection.run_index.complete:
        log.warning(
            "%s: expected a complete run for %d ranks, got a run that may still grow. Ranks that open it at different "
            "moments divide different samples: some are read twice, and some by no rank. Wait for the run's end, pass "
            "follow=True, or pass run.select(keys=…) with the same keys on all ranks",
            *(selection.run.url, ranks),
        )


def _found_world() -> tuple[int, int]:
    if importlib.util.find_spec("torch") is not None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
