"""Random samples as pages, for tests of writers and formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from hsx_dist.page import CARRIER, Page, Segment


@dataclass(frozen=True, eq=False)
class RandomSample:
    """``states``: the dtype's carrier, ``[T, L, H]``; ``token_ids``: int64 ``[T]``."""

    key: str
    states: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any]
    layer_ids: tuple[int, ...]
    dtype: str
    chunk_tokens: int

    def segments(self, *cuts: int) -> list[Segment]:
        """Return the sample's segments, cut at these tokens. The tokens need not be multiples of ``chunk_tokens``."""
        total = len(self.token_ids)
        ends = [0, *cuts, total]
        return [Segment(self.key, i, a, b, total) for i, (a, b) in enumerate(pairwise(ends))]

    def pages(
        self, segment: Segment | None = None, *, order: Literal["LTH", "TLH"] = "LTH", padding: int = 0
    ) -> Iterator[Page]:
        """Yield the pages of ``segment`` (default: the whole sample), each with ``padding`` meaningless rows."""
        segment = segment or self.segments()[0]
        for start in range(segment.start, segment.stop, self.chunk_tokens):
            stop = min(start + self.chunk_tokens, segment.stop)
            data = np.concatenate([self.states[start:stop], np.full_like(self.states[:1], 0xABCD).repeat(padding, 0)])
            data = np.ascontiguousarray(data.transpose(1, 0, 2) if order == "LTH" else data)
            layers, rows, hidden = data.shape
            yield Page(
                segment=segment,
                start=start,
                stop=stop,
                chunk_tokens=self.chunk_tokens,
                layer_ids=self.layer_ids,
                dtype=self.dtype,
                shape=(layers, rows, hidden),
                order=order,
                token_ids=self.token_ids[start:stop],
                data=data,
            )


def random_sample(
    key: str = "a",
    tokens: int = 37,
    *,
    layer_ids: Sequence[int] = (2, 15, 30),
    hidden_size: int = 24,
    dtype: str = "bfloat16",
    chunk_tokens: int = 16,
    seed: int = 0,
    odd: bool = True,
) -> RandomSample:
    """Return Gaussian states with a scale for each channel. ``odd``: with a few NaN, infinities, -0 and random bits."""
    rng = np.random.default_rng([seed, tokens, len(layer_ids), hidden_size])
    shape = (tokens, len(layer_ids), hidden_size)
    values = (rng.standard_normal(shape) * np.exp(rng.standard_normal(hidden_size))).astype(np.float32)
    if dtype == "float16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = values.view(np.uint32)
        if dtype == "bfloat16":
            bits = (bits >> 16).astype(np.uint16)
    width = 8 * bits.itemsize
    noise = rng.integers(0, 1 << width, bits.size // 16 + 1, dtype=np.uint64).astype(CARRIER[dtype])
    noise[:4] = [1 << (width - 1), 0x7F << (width - 8), 0xFF << (width - 8), (1 << width) - 1][: len(noise)]
    places = rng.integers(0, bits.size, len(noise))
    if odd:
        bits.reshape(-1)[places] = noise
    token_ids = rng.integers(0, 50_000, tokens)
    return RandomSample(key, bits, token_ids, tuple(layer_ids), dtype, chunk_tokens)
