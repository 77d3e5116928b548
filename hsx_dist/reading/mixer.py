"""Tokens of many samples, mixed within a bounded number of tokens; a position in the mixture is a few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Named arrays of one length, such as ``{"hidden_states": [n, L, H], "input_ids": [n]}``.
Rows = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """``tokens`` consecutive tokens of a data set, divided for the rounds in which they are given.

    ``shares``: rows of round ``number``, of the next round, and so on; removed as they are given. ``begin``: the
    position before the block's first token. ``digest``: of its token ids.
    """

    number: int
    shares: list[Rows]
    tokens: int
    begin: dict[str, Any]
    digest: str


def share_sizes(block_tokens: int, batch_tokens: int, keep: float) -> list[int]:
    """How many tokens of a block each round gives: whole batches; the fraction ``keep`` of what is left stays.

    In a buffer that keeps a random fraction, a token stays for an unbounded number of rounds, and a restart would have
    to repeat all rounds. Here the last of at most eight shares takes the rest: a position needs eight blocks.
    """
    left = block_tokens // batch_tokens
    sizes: list[int] = []
    while left:
        give = left if keep == 0 or len(sizes) == 7 else min(left, max(1, round(left * (1 - keep))))
        sizes.append(give * batch_tokens)
        left -= give
    return sizes


def divide(rows: Rows, sizes: Sequence[int], seed: Sequence[int]) -> list[Rows]:
    """Random shares of ``rows`` with these sizes. Each has memory of its own, which is free once it is given."""
    total = len(rows["input_ids"])
    order = np.random.default_rng(seed).permutation(total)
    ends = np.cumsum(sizes)
    return [{name: x[picks] for name, x in rows.items()} for picks in np.split(order, ends[ends < total])]


def draw(shares: Sequence[Rows], batch_tokens: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Batches of a round: uniform draws without replacement from all shares. Each share is in random order already, so
    a batch copies one range of each."""
    left = np.array([len(share["input_ids"]) for share in shares], np.int64)
    at = np.zeros_like(left)
    while total := int(left.sum()):
        taken = rng.multivariate_hypergeometric(left, min(batch_tokens, total), method="marginals")
        ranges = [(share, int(a), int(a + n)) for share, a, n in zip(shares, at, taken, strict=True) if n]
        yield {name: concatenate([share[name][a:b] for share, a, b in ranges]) for name in shares[0]}
        left, at = left - taken, at + taken


def one_ahead(source: Iterator[Block]) -> Generator[Block, None, None]:
    """The blocks of ``source``; a thread makes the next one while the consumer uses the last."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="hsx-mix")
    try:
        future = pool.submit(next, source, None)
        while (block := future.result()) is not None:
            future = pool.submit(next, source, None)
            yield block
            del block
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def digest(ids: Any) -> str:
    """16 hex digits of token ids."""
    return hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()


def concatenate(arrays: list[Any]) -> Any:
    """One new array, also of a single one: a view would keep all of its block in memory."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch

    return torch.cat(arrays)
