"""The codec's contract: a reversible (or declared lossy) encoding of one chunk of one layer into bytes."""

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

#: How many times larger than its stored bytes decoded states may be, where a user says so.
EXPANSION_VARIABLE = "HSX_MAX_EXPANSION"
#: Decoded bytes for one stored byte, unless the variable says another number.
_EXPANSION = 64
#: So much is decoded from however few bytes.
_FREE_BYTES = 64 << 20


@runtime_checkable
class Codec(Protocol):
    """A frozen value that serialises itself. It may be used from several threads at once.

    A codec may have one method more, ``encode_into(x, dtype, allocate, look)``: see the function of that name.

    ``name`` is what objects call it; ``lossy`` whether ``decode`` may give back other bits than ``encode`` got. Prove
    one of your own with ``hsx_dist.testing.codec_suite``.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        """Buffers that are stored one behind the other; they may refer to ``x``, which stays as it is until they are
        copied, but to no memory that a later call uses again.

        ``x``: the carrier of ``dtype`` (a key of ``CARRIER``), shape ``[n, H]``; its rows may be strided. The same bits
        give the same bytes.
        """

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        """Fill ``out``, a carrier array ``[n, H]`` whose rows may be strided, from the stored bytes ``data``.

        Allocates no more than a few times the size of ``out``, whatever ``data`` says. ``FormatError`` when they do
        not fit each other; ``out`` then means nothing.
        """

    def to_dict(self) -> dict[str, Any]:
        """``{"name": …}`` and the parameters, JSON types only; ``codec_from_dict`` makes an equal codec of it."""


#: Gives memory for encoded bytes: uint8 ``[n]``, its content arbitrary.
Allocate = Callable[[int], np.ndarray[Any, Any]]
#: Is shown the rows that are encoded, some at a time, while they are in the processor's cache.
Look = Callable[[np.ndarray[Any, Any]], None]


def allocate(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory of its own, uint8 ``[nbytes]``."""
    return np.empty(nbytes, np.uint8)


@runtime_checkable
class EncodesInto(Protocol):
    """A codec that writes into memory which its caller gives."""

    def encode_into(
        self, x: np.ndarray[Any, Any], dtype: str, allocate: Allocate, look: Look, /
    ) -> np.ndarray[Any, Any]:
        """As the function of this name."""


def encode_into(
    codec: Codec, x: np.ndarray[Any, Any], dtype: str, allocate: Allocate = allocate, look: Look = lambda _: None
) -> np.ndarray[Any, Any]:
    """What ``codec.encode(x, dtype)`` gives, as one array uint8 ``[n]`` of what ``allocate`` gives; ``look`` is shown
    every row of ``x`` once.

    A codec that can write there itself is an ``EncodesInto``, whose method is called instead.
    """
    if isinstance(codec, EncodesInto):
        return codec.encode_into(x, dtype, allocate, look)
    for rows in blocks(x):
        look(rows)
    # Copied while it is in the cache: what the codec allocates is freed at once, and the next call gets it again.
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


#: Elements that are worked on at once: what comes of them fits the processor's cache beside them.
_BLOCK = 1 << 18


def blocks(*arrays: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Arrays of as many rows, some rows of each at a time: what is read from memory once is still in the cache when it
    is read again. One array's are given alone, several's as tuples."""
    first = arrays[0]
    step = max(1, _BLOCK // max(1, first[0].size)) if len(first) else 1
    for a in range(0, len(first), step):
        yield arrays[0][a : a + step] if len(arrays) == 1 else tuple(x[a : a + step] for x in arrays)


_local = threading.local()
#: More than this is not kept between calls: a chunk is usually a MiB or two.
_LARGEST_SCRATCH = 4 << 20


def scratch(name: str, nbytes: int) -> np.ndarray[Any, Any]:
    """uint8 ``[nbytes]`` of this thread's own, valid until the thread asks for ``name`` again.

    Memory that is fresh for every chunk costs more in page faults than the codec's own work.
    """
    kept: dict[str, np.ndarray[Any, Any]] = _local.__dict__.setdefault("kept", {})
    found = kept.get(name)
    if found is None or found.nbytes < nbytes:
        found = np.empty(nbytes, np.uint8)
        if nbytes <= _LARGEST_SCRATCH:
            kept[name] = found
    return found[:nbytes]


def check_expansion(raw_bytes: int, stored_bytes: int) -> None:
    """Refuse to allocate ``raw_bytes`` for what ``stored_bytes`` encode.

    Codecs halve states, or take a fifth; a zstd frame can hold 32,768 times its length, where all values are equal.

    Raises:
        FormatError: it is more than ``HSX_MAX_EXPANSION`` (default: 64) times as much, and more than 64 MiB.
        ConfigError: that variable is no number.
    """
    if raw_bytes <= _FREE_BYTES:
        return
    text = os.environ.get(EXPANSION_VARIABLE) or str(_EXPANSION)
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigError(f"{EXPANSION_VARIABLE}: expected a whole number from 1 to 999999, got {text!r}. Correct it")
    if raw_bytes > _FREE_BYTES + int(text) * stored_bytes:
        raise FormatError(
            f"expected states of at most {text} times the {stored_bytes} bytes that encode them, got a claim of "
            f"{raw_bytes} bytes. If you trust the object, set {EXPANSION_VARIABLE} to a larger number"
        )
