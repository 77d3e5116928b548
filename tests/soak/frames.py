"""Damaged zstd frames for the compiled decoder of ``split``: it gives what libzstd gives, or no answer."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.huffman import join_planes
from hsx_dist.format.codecs.zstd import compress_huffman, decompress_into, walk

#: Damaged ones of each whole frame.
OF_EACH = 10


def high_bytes(rng, n: int, *, spread: float = 3.0, alphabet: int = 256) -> np.ndarray:
    """As of floats: some exponents with either sign, often, and others seldom."""
    exponents = np.clip(rng.normal(60, spread, n).round(), 0, 127).astype(np.uint8)
    return ((exponents | rng.integers(0, 2, n, np.uint8) << 7) % np.uint16(alphabet)).astype(np.uint8)


def joined(frame: bytes, low: np.ndarray, *, width: int | None = None, apart: int = 0) -> np.ndarray | None:
    """uint16 ``[n]``, or None where the compiled decoder leaves it to libzstd."""
    width = width or low.size
    pitch = width + apart
    memory = np.full(low.size // width * pitch - apart + 64, 0xDEAD, np.uint16)
    out = memory[:-64]
    if not join_planes(np.frombuffer(frame, np.uint8), *walk(memoryview(frame), low.size), low, out, width, pitch):
        return None
    assert (memory[-64:] == 0xDEAD).all()
    rows = np.lib.stride_tricks.as_strided(out, (low.size // width, width), (2 * pitch, 2))
    between = np.lib.stride_tricks.as_strided(out[width:], (low.size // width - 1, apart), (2 * pitch, 2))
    assert (between == 0xDEAD).all()
    return rows.reshape(-1)


def expected(frame: bytes, low: np.ndarray) -> np.ndarray:
    high = np.empty(low.size, np.uint8)
    decompress_into(memoryview(frame), high)
    return low.astype(np.uint16) | high.astype(np.uint16) << 8


def compare(rng: random.Random) -> Counter[str]:
    """``OF_EACH`` damaged frames of one plane: what became of how many.

    Raises:
        AssertionError: one was decoded to something else than by libzstd, or beyond its memory.
    """
    n = rng.randint(500, 60_000)
    many = np.random.default_rng(rng.getrandbits(32))
    high = high_bytes(many, n, spread=rng.uniform(0.5, 10), alphabet=rng.choice([6, 40, 256]))
    low = many.integers(0, 256, n, np.uint8)
    whole = compress_huffman(high)
    tally: Counter[str] = Counter()
    for _ in range(OF_EACH):
        frame = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            # Half of them where sizes and the tree stand.
            at = rng.randrange(min(len(frame), 150)) if rng.random() < 0.5 else rng.randrange(len(frame))
            frame[at] = rng.getrandbits(8)
        if rng.random() < 0.1:
            del frame[rng.randrange(len(frame)) :]
        try:
            found = joined(bytes(frame), low)
        except FormatError:
            tally["refused by its blocks' headers"] += 1
            continue
        if found is None:
            tally["left to libzstd"] += 1
            continue
        try:
            same = bool((found == expected(bytes(frame), low)).all())
        except FormatError as e:
            raise AssertionError(f"libzstd refuses what was decoded: {e}") from e
        assert same, "libzstd decodes something else"
        tally["decoded alike"] += 1
    return tally
