"""``none``: the values without encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.format.codecs.base import Allocate, Look, blocks, flat, itemsize, raw_array
from hsx_dist.store.base import Buffer


@dataclass(frozen=True, slots=True)
class NoneCodec:
    """The values, little-endian. Tensors have the true dtype and shape, so that any safetensors reader can use them."""

    name: ClassVar[str] = "none"
    lossy: ClassVar[bool] = False

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:  # noqa: ARG002
        return (flat(np.ascontiguousarray(x)),)

    def encode_into(
        self,
        x: np.ndarray[Any, Any],
        dtype: str,  # noqa: ARG002
        allocate: Allocate,
        look: Look,
    ) -> np.ndarray[Any, Any]:
        """Like ``encode``, into one array from ``allocate``."""
        data = allocate(x.nbytes)
        for rows, place in blocks(x, data.view(x.dtype).reshape(x.shape)):
            look(rows)
            np.copyto(place, rows)
        return data

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        out[:] = raw_array(data, itemsize(dtype), out.shape, "values")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}
