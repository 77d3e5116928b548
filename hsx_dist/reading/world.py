"""Rank and world size of a training process, and a number that it shares with its workers."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from hsx_dist.errors import ConfigError


class SharedNumber:
    """A number in memory that the workers of a ``DataLoader`` share. Not shared without torch."""

    def __init__(self) -> None:
        self._tensor: Any = None
        self._number = 0
        if importlib.util.find_spec("torch") is not None:
            import torch

            self._tensor = torch.zeros(1, dtype=torch.int64).share_memory_()

    def get(self) -> int:
        return self._number if self._tensor is None else int(self._tensor[0])

    def set(self, value: int) -> None:
        if self._tensor is None:
            self._number = value
        else:
            self._tensor[0] = value


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: the arguments, else from torch.distributed, else from the environment (torchrun).

    Raises ``ConfigError`` if only one is given, or if the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank, world_size: expected both or none, got one. Give both")
    if rank is None or world_size is None:
        rank, world_size = _found_world()
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 … {world_size - 1} of world_size {world_size}, got {rank}. Correct them")
    return rank, world_size


def _found_world() -> tuple[int, int]:
    if importlib.util.find_spec("torch") is not None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
