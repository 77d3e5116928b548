"""The codec interface: a reversible (or declared lossy) encoding of one chunk of one layer into bytes."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.page import CARRIER
from hsx_dist.store.base import Buffer, as_bytes_view

#: Environment variable: how many times larger than their stored bytes decoded states may be.
EXPANSION_VARIABLE = "HSX_MAX_EXPANSION"
#: Decoded bytes allowed for one stored byte when the variable is not set.
_EXPANSION = 64
#: Decoded bytes that are always allowed, however few bytes are stored.
FREE_BYTES = 64 << 20
#: Token ids and attached arrays that are read at once. The limit is at least the first, and the second times the
#: variable. A context of ten million tokens has 80 MB of ids.
_WHOLE_BYTES, _WHOLE_STEP = 256 << 20, 4 << 20


@runtime_checkable
class Codec(Protocol):
    """A frozen value that serialises itself. Several threads may use it at once.

    A codec may have one more method, ``encode_into(x, dtype, allocate, look)``: see the function of that name.

    ``name``: the codec's name in stored objects. ``lossy``: whether ``decode`` may return other bits than ``encode``
    got. Test a new codec with ``hsx_dist.testing.codec_suite``.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        """Return buffers whose concatenation is stored.

        They may refer to ``x``, which the caller does not change until it has copied them. They must not refer to
        memory that a later call reuses.

        ``x``: the carrier of ``dtype`` (a key of ``CARRIER``), shape ``[n, H]``; its rows may be strided. Equal bits in
        ``x`` encode to equal bytes.
        """

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        """Fill ``out``, a carrier array ``[n, H]`` whose rows may be strided, from the stored bytes ``data``.

        Allocates no more than a few times the size of ``out``, even if ``data`` claims more. Raises ``FormatError``
        when ``data`` is not an encoding of this shape; the content of ``out`` is then undefined.
        """

    def to_dict(self) -> dict[str, Any]:
        """``{"name": …}`` and the parameters, JSON types only; ``codec_from_dict`` makes an equal codec from it."""


#: Returns memory for encoded bytes: uint8 ``[n]``, its content arbitrary.
Allocate = Callable[[int], np.ndarray[Any, Any]]
#: Called with the rows that are encoded, some at a time, while they are in the processor's cache.
Look = Callable[[np.ndarray[Any, Any]], None]


def allocate(nbytes: int) -> np.ndarray[Any, Any]:
    """New memory, uint8 ``[nbytes]``."""
    return np.empty(nbytes, np.uint8)


@runtime_checkable
class EncodesInto(Protocol):
    """A codec that writes into memory from its caller."""

    def encode_into(
        self, x: np.ndarray[Any, Any], dtype: str, allocate: Allocate, look: Look, /
    ) -> np.ndarray[Any, Any]:
        """Like the function ``encode_into``."""


def encode_into(
    codec: Codec, x: np.ndarray[Any, Any], dtype: str, allocate: Allocate = allocate, look: Look = lambda _: None
) -> np.ndarray[Any, Any]:
    """The result of ``codec.encode(x, dtype)`` as one array uint8 ``[n]`` from ``allocate``. Calls ``look`` with every
    row of ``x`` once.

    If the codec is an ``EncodesInto``, its method is called instead.
    """
    if isinstance(codec, EncodesInto):
        return codec.encode_into(x, dtype, allocate, look)
    for rows in blocks(x):
        look(rows)
    # Copy now, while the bytes are in the cache. The codec's buffers are then freed and the next call reuses them.
    views = list(map(as_bytes_view, codec.encode(x, dtype)))
    data, at = allocate(sum(v.nbytes for v in views)), 0
    for view in views:
        data[at : at + view.nbytes] = view
        at += view.nbytes
    return data


def raw_array(data: memoryview, itemsize: int, shape: tuple[int, ...], what: str) -> np.ndarray[Any, Any]:
    """``data`` as unsigned little-endian integers of ``itemsize`` bytes, a view of ``shape``, or ``FormatError``."""
    expected = math.prod(shape) * itemsize
    if data.nbytes != expected:
        raise FormatError(f"{what}: expected {expected} bytes for {list(shape)}, got {data.nbytes}")
    return np.frombuffer(data, dtype=f"<u{itemsize}").reshape(shape)


def flat(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A contiguous array as its bytes: uint8 ``[nbytes]``, a view."""
    return x.reshape(-1).view(np.uint8)


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return np.dtype(CARRIER[dtype]).itemsize


#: Elements that are processed at once: they and their results fit the processor's cache.
_BLOCK = 1 << 18


def blocks(*arrays: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Iterate over arrays of equal length, some rows at a time, so that a second read of the rows finds them in the
    cache. Yields arrays for one argument, tuples for several."""
    first = arrays[0]
    step = max(1, _BLOCK // max(1, first[0].size)) if len(first) else 1
    for a in range(0, len(first), step):
        yield arrays[0][a : a + step] if len(arrays) == 1 else tuple(x[a : a + step] for x in arrays)


_local = threading.local()
#: Larger buffers are not kept between calls. A chunk usually has 1 or 2 MiB.
_LARGEST_SCRATCH = 4 << 20


def scratch(name: str, nbytes: int) -> np.ndarray[Any, Any]:
    """A buffer of this thread, uint8 ``[nbytes]``, valid until the thread asks for ``name`` again.

    New memory for every chunk would cost more in page faults than the codec's work.
    """
    kept: dict[str, np.ndarray[Any, Any]] = _local.__dict__.setdefault("kept", {})
    found = kept.get(name)
    if found is None or found.nbytes < nbytes:
        found = np.empty(nbytes, np.uint8)
        if nbytes <= _LARGEST_SCRATCH:
            kept[name] = found
    return found[:nbytes]


def check_expansion(raw_bytes: int, stored_bytes: int) -> None:
    """Refuse to allocate ``raw_bytes`` for states whose encoding has ``stored_bytes``.

    Codecs shrink states to between half and a fifth. A zstd frame of equal values can hold 32,768 times its length.

    Raises:
        FormatError: ``raw_bytes`` is more than 64 MiB plus ``HSX_MAX_EXPANSION`` (default: 64) times ``stored_bytes``.
        ConfigError: the variable is not a whole number from 1 to 999999.
    """
    if raw_bytes > FREE_BYTES and raw_bytes > FREE_BYTES + (most := _most_expansion()) * stored_bytes:
        raise FormatError(
            f"expected states of at most {most} times the {stored_bytes} bytes that encode them, got a header "
            f"with {raw_bytes} bytes. If you trust the object, set {EXPANSION_VARIABLE} to a larger number"
        )


def check_whole(nbytes: int) -> None:
    """Refuse to fetch ``nbytes`` of token ids and attached arrays at once. In a file with holes they have any size.

    Raises:
        FormatError: ``nbytes`` is more than 256 MiB and more than ``HSX_MAX_EXPANSION`` (default: 64) times 4 MiB.
        ConfigError: as ``check_expansion``.
    """
    if nbytes > _WHOLE_BYTES and nbytes > (most := _WHOLE_STEP * _most_expansion()):
        raise FormatError(
            f"expected token ids and attached arrays of at most {max(most, _WHOLE_BYTES)} bytes, got a header with "
            f"{nbytes} bytes. If you trust the object, set {EXPANSION_VARIABLE} to {-(-nbytes // _WHOLE_STEP)} or more"
        )


def _most_expansion() -> int:
    text = os.environ.get(EXPANSION_VARIABLE) or str(_EXPANSION)
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigError(f"{EXPANSION_VARIABLE}: expected a whole number from 1 to 999999, got {text!r}. Correct it")
    return int(text)
