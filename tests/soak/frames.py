"""Damaged and forged zstd frames for the compiled decoder of ``split``: it gives what libzstd gives, or no answer."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.huffman import join_planes
from hsx_dist.format.codecs.zstd import compress_huffman, decompress_into, walk

#: Frames of one length, damaged ones of one plane or forged ones.
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


def forged(rng: random.Random, n: int) -> bytes:
    """A frame of ``n`` symbols that libzstd would not make: one block, four bits a weight, any tree whose codes use up
    all bits, or nearly."""
    log = rng.randint(1, 12)
    weights, left = [], 1 << log
    while left and len(weights) < 128:
        most = left.bit_length()
        weight = rng.randint(0 if rng.random() < 0.3 else 1, min(most, log))
        weights.append(weight)
        left -= (1 << weight) >> 1
    if rng.random() < 0.5:
        rng.shuffle(weights)
    if not weights or weights[-1] == 0:
        weights.append(1)
    told = weights[:-1]  # the last one follows
    at, codes = 0, {}
    for weight in range(1, max(weights) + 1):
        for symbol, its in enumerate(weights):
            if its == weight:
                codes[symbol] = (at >> (weight - 1), log + 1 - weight)
                at += 1 << (weight - 1)
    known = [s for s in codes if codes[s][1] > 0] or [0]
    symbols = rng.choices(known, k=n)
    quarter = (n + 3) // 4
    streams = []
    for k in range(4):
        bits = 1  # the mark at the stream's end; the first symbol lies highest
        value, length = 0, 0
        for symbol in reversed(symbols[k * quarter : (k + 1) * quarter]):
            code, width = codes.get(symbol, (0, 1))
            value |= code << length
            length += width
        value |= bits << length
        streams.append(value.to_bytes(length // 8 + 1, "little"))
    nibbles = [*told, 0][: len(told) + len(told) % 2]
    tree = bytes([127 + len(told)]) + bytes(a << 4 | b for a, b in zip(nibbles[::2], nibbles[1::2], strict=True))
    body = tree + b"".join(len(s).to_bytes(2, "little") for s in streams[:3]) + b"".join(streams)
    literals = (2 | 3 << 2 | n << 4 | len(body) << 22).to_bytes(5, "little") + body + b"\0"
    block = (1 | 2 << 1 | len(literals) << 3).to_bytes(3, "little") + literals
    return b"\x28\xb5\x2f\xfd\xa0" + n.to_bytes(4, "little") + block


def compare(rng: random.Random) -> Counter[str]:
    """``OF_EACH`` damaged or forged frames of one plane: what became of how many.

    Raises:
        AssertionError: one was decoded to something else than by libzstd, or beyond its memory.
    """
    forge = rng.random() < 0.3
    n = rng.randint(20, 3_000) if forge else rng.randint(500, 60_000)
    many = np.random.default_rng(rng.getrandbits(32))
    low = many.integers(0, 256, n, np.uint8)
    high = high_bytes(many, n, spread=rng.uniform(0.5, 10), alphabet=rng.choice([6, 40, 256]))
    whole = compress_huffman(high)
    tally: Counter[str] = Counter()
    for _ in range(OF_EACH):
        frame = bytearray(forged(rng, n) if forge else whole)
        for _ in range(rng.randint(0, 1) if forge else rng.randint(1, 4)):
            # Half of them where sizes and the tree stand.
            at = rng.randrange(min(len(frame), 150)) if rng.random() < 0.5 else rng.randrange(len(frame))
            frame[at] = rng.getrandbits(8)
        if rng.random() < 0.05:
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
