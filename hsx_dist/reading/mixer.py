"""Tokens of many samples, mixed within a bounded number of tokens; a position in the mixture is a few numbers."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError

#: Named arrays of one length, such as ``{"hidden_states": [n, L, H], "input_ids": [n]}``.
RowArrays = dict[str, Any]
#: Which slots, int64 ``[n]``.
Places = np.ndarray[Any, np.dtype[np.int64]]
#: Rounds among which a block is divided, at most: a position in a mixture needs so many blocks.
MOST_SHARES = 8


@dataclass(frozen=True)
class Block:
    """``tokens`` consecutive tokens of a data set, divided for the rounds in which they are given.

    ``shares``: slots of round ``number``, of the next round, and so on; removed as they are given. ``begin``: the
    position before the block's first token. ``digest``: of its token ids.
    """

    number: int
    shares: list[Places]
    tokens: int
    begin: dict[str, Any]
    digest: str


class Slots:
    """Memory for tokens, used again once they are given. A token is copied in and out, and not in between.

    Fresh memory for each refill costs more than these copies: every first touch of a page is a fault.

    ``free``: lots of ``batch_tokens`` slots each. One thread may take lots and put rows while another gives batches.
    """

    def __init__(self, lots: int, batch_tokens: int):
        self.free = deque(np.split(np.arange(lots * batch_tokens), lots))
        self._tokens = lots * batch_tokens
        self._memory: dict[str, np.ndarray[Any, Any]] = {}
        self._like: RowArrays = {}

    def put(self, places: Places, rows: RowArrays, start: int) -> None:
        """Copy rows ``[start, start + len(places))`` to ``places``.

        Raises:
            FormatError: they have another dtype or shape than those before.
            ConfigError: there is no memory for the buffer.
        """
        for name, x in rows.items():
            if name not in self._memory:
                self._like[name] = x[:0]
                self._memory[name] = self._buffer(_as_bytes(x).dtype)
            like = self._like[name]
            if (like.dtype, like.shape[1:]) != (x.dtype, x.shape[1:]):
                raise FormatError(
                    f"{name}: expected rows of {like.dtype} {tuple(like.shape[1:])} as before, got {x.dtype} "
                    f"{tuple(x.shape[1:])}. Name the layers when the data set is made"
                )
            self._memory[name][places] = _as_bytes(x[start : start + len(places)])

    def _buffer(self, row: np.dtype[Any]) -> np.ndarray[Any, Any]:
        try:
            return np.empty(self._tokens, row)
        except MemoryError:
            raise ConfigError(
                f"buffer_tokens: expected a buffer that fits into memory, got {self._tokens} tokens of {row.itemsize} "
                "bytes. Take fewer"
            ) from None

    def get(self, places: Places) -> RowArrays:
        """The rows at ``places``, in memory of their own."""
        return {name: _from_bytes(memory.take(places), self._like[name]) for name, memory in self._memory.items()}

    def digest(self, places: Places) -> str:
        """As ``digest``, of the token ids at ``places``."""
        return digest(self._memory["input_ids"].take(places))


def _as_bytes(x: Any) -> np.ndarray[Any, Any]:
    """``[n]`` of rows as their bytes: numpy moves them several times as fast as torch moves rows of bf16."""
    if not isinstance(x, np.ndarray):
        import torch

        x = x.reshape(len(x), -1).view(torch.uint8).numpy()
    x = np.ascontiguousarray(x).reshape(len(x), math.prod(x.shape[1:]))
    return x.view(np.dtype((np.void, x.shape[1] * x.itemsize)))[:, 0]


def _from_bytes(rows: np.ndarray[Any, Any], like: Any) -> Any:
    """``_as_bytes``'s array with the dtype and shape of ``like``."""
    if isinstance(like, np.ndarray):
        return rows.view(like.dtype).reshape(len(rows), *like.shape[1:])
    import torch

    return torch.from_numpy(rows.view(np.uint8)).view(like.dtype).view(len(rows), *like.shape[1:])


class Refill:
    """The next block of ``steps``, read little by little while batches of the present round are given.

    ``steps``: each has read one batch's tokens. It is ``None``, or the block that these complete.
    """

    def __init__(self, steps: Iterator[Block | None], steps_of_block: int):
        self._steps, self._all = steps, steps_of_block
        self._done, self._ended = 0, False
        self._block: Block | None = None

    def read(self, part: float) -> None:
        """Read until the block is there as far as ``part``, from 0 to 1."""
        while self._block is None and not self._ended and self._done < part * self._all:
            self._done += 1
            try:
                self._block = next(self._steps)
            except StopIteration:
                self._ended = True

    def take(self) -> Block | None:
        """The whole block, the last of which may have fewer tokens; ``None`` after it."""
        self.read(1)
        block, self._block, self._done = self._block, None, 0
        return block


def share_sizes(block_tokens: int, batch_tokens: int, keep: float) -> list[int]:
    """How many tokens of a block each round gives: whole batches; the fraction ``keep`` of what is left stays.

    In a buffer that keeps a random fraction, a token stays for an unbounded number of rounds, and a restart would have
    to repeat all rounds. Here the last of at most eight shares takes the rest: a position needs eight blocks.
    """
    left = block_tokens // batch_tokens
    sizes: list[int] = []
    while left:
        give = left if keep == 0 or len(sizes) == MOST_SHARES - 1 else min(left, max(1, round(left * (1 - keep))))
        sizes.append(give * batch_tokens)
        left -= give
    return sizes


def most_lots(sizes: Sequence[int], batch_tokens: int) -> int:
    """Lots of ``batch_tokens`` slots that a mixture needs: the buffer, one refill, and the batch that is given next."""
    buffer = sum(sum(sizes[first:]) for first in range(len(sizes)))
    return (buffer + sum(sizes)) // batch_tokens + 1


def divide(places: Places, sizes: Sequence[int], seed: Sequence[int]) -> list[Places]:
    """Random shares of ``places`` with these sizes."""
    ends = np.cumsum(sizes)
    return np.split(np.random.default_rng(seed).permutation(places), ends[ends < len(places)])


def draw(shares: Sequence[Places], batch_tokens: int, rng: np.random.Generator) -> Iterator[Places]:
    """Batches of a round: uniform draws without replacement from all shares. Each share is in random order already, so
    a batch takes one range of each."""
    left = np.array([len(share) for share in shares], np.int64)
    at = np.zeros_like(left)
    while total := int(left.sum()):
        taken = rng.multivariate_hypergeometric(left, min(batch_tokens, total), method="marginals")
        yield np.concatenate([share[a : a + n] for share, a, n in zip(shares, at, taken, strict=True)])
        left, at = left - taken, at + taken


def ahead(source: Iterator[Block | None], depth: int, left: Event) -> Generator[Block | None, None, None]:
    """The steps of ``source``; a thread makes as many as ``depth`` before they are asked for. ``left`` is set when no
    more are wanted: a step that looks for tokens may take an epoch."""
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="hsx-mix")
    try:
        queue: deque[Future[Any]] = deque(pool.submit(next, source, end) for _ in range(depth))
        while (step := queue.popleft().result()) is not end:
            queue.append(pool.submit(next, source, end))
            yield step
    finally:
        left.set()
        pool.shutdown(wait=True, cancel_futures=True)


def digest(ids: Any) -> str:
    """16 hex digits of token ids."""
    return hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()
