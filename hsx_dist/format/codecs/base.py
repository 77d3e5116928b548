"""The codec's contract: a reversible (or declared lossy) encoding of one chunk of one layer into byte planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.page import CARRIER
from hsx_dist.store.base import Buffer, as_bytes_view


@dataclass(frozen=True, slots=True)
class Plane:
    """One stream of an encoded layer.

    ``bytes_per_element``: a raw plane has that many bytes for every element, so its size and the place of every row
    are known; ``None``: the size varies from chunk to chunk and is written down. A codec whose only plane has the
    name ``""`` stores the values as they are: the tensor then has the true dtype and shape.
    """

    name: str
    bytes_per_element: int | None


@runtime_checkable
class Codec(Protocol):
    """A frozen value that serialises itself. It may be used from several threads at once."""

    name: ClassVar[str]

    def planes(self, dtype: str) -> tuple[Plane, ...]:
        """The planes of an array of ``dtype`` (a key of ``CARRIER``), in the order in which they are stored."""

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        """One buffer a plane, none of them sharing memory with ``x``: the page is reused as soon as this returns.

        ``x``: the dtype's carrier, shape ``[n, H]``; its rows may be strided. The same bits give the same bytes.
        """

    def decode(self, planes: Sequence[Buffer], n: int, hidden_size: int, dtype: str) -> np.ndarray[Any, Any]:
        """The carrier array ``[n, hidden_size]``, which may be a read-only view of ``planes``.

        Allocates no more than a few times the array's size, whatever the planes say. ``FormatError`` when they do not
        fit it.
        """

    def to_dict(self) -> dict[str, Any]:
        """``{"name": …}`` and the parameters, JSON types only; ``codec_from_dict`` makes an equal codec of it."""


def raw_plane(data: Buffer, itemsize: int, n: int, hidden_size: int, plane: str) -> np.ndarray[Any, Any]:
    """``data`` as ``[n, hidden_size]`` unsigned integers of ``itemsize`` bytes, a view, or ``FormatError``."""
    view = as_bytes_view(data)
    expected = n * hidden_size * itemsize
    if view.nbytes != expected:
        raise FormatError(f"plane {plane!r}: expected {expected} bytes for [{n}, {hidden_size}], got {view.nbytes}")
    return np.frombuffer(view, dtype=f"<u{itemsize}").reshape(n, hidden_size)


def flat(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A contiguous array as its bytes: uint8 ``[nbytes]``, a view."""
    return x.reshape(-1).view(np.uint8)


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return np.dtype(CARRIER[dtype]).itemsize
