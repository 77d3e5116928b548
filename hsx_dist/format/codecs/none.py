"""``none``: the values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.format.codecs.base import Plane, flat, itemsize, raw_plane
from hsx_dist.store.base import Buffer


@dataclass(frozen=True, slots=True)
class NoneCodec:
    """One raw plane of the true dtype: stock readers see bf16, fp16 or fp32 tensors."""

    name: ClassVar[str] = "none"

    def planes(self, dtype: str) -> tuple[Plane, ...]:
        return (Plane("", itemsize(dtype)),)

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:  # noqa: ARG002
        return (flat(np.array(x, order="C")),)

    def decode(self, planes: Sequence[Buffer], n: int, hidden_size: int, dtype: str) -> np.ndarray[Any, Any]:
        (data,) = planes
        return raw_plane(data, itemsize(dtype), n, hidden_size, "")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}
