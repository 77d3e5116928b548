"""Mix the tokens of many samples in a buffer of bounded size. A position in the mixture is a few numbers."""

from __future__ import annotations

import hashlib
import math
import sys
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
#: Slot numbers, int64 ``[n]``.
Places = np.ndarray[Any, np.dtype[np.int64]]
#: Maximum number of rounds that a block is divided among. A resume reads up to this many blocks again.
MOST_SHARES = 8


@dataclass(frozen=True)
class Block:
    """``tokens`` consecutive tokens of a data set, divided among the rounds that yield them.

    ``shares``: slots for round ``number``, for the next round, and so on. A round removes its share. ``begin``: the
    position before the block's first token. ``digest``: hash of its token ids and samples.
    """

    number: int
    shares: list[Places]
    tokens: int
    begin: dict[str, Any]
    digest: str


class Slots:
    """Reused memory for tokens. A token is copied once in and once out.

    New memory for each refill would cost more than these copies, because the first access to each page is a fault.

    ``free``: lots of ``batch_tokens`` slots each. One thread may take lots and put rows while another yields batches.
    """

    def __init__(self, lots: int, batch_tokens: int):
        self.free = deque(np.split(np.arange(lots * batch_tokens), lots))
        self._tokens = lots * batch_tokens
        self._memory: dict[str, np.ndarray[Any, Any]] = {}
        self._like: RowArrays = {}

    def put(self, places: Places, rows: RowArrays, start: int) -> None:
        """Copy rows ``[start, start + len(places))`` to ``places``.

        Raises:
            FormatError: the rows differ from earlier ones in dtype or shape.
            ConfigError: the buffer does not fit into memory.
        """
        for name, x in rows.items():
            if name not in self._memory:
                self._like[name] = x[:0]
                self._memory[name] = zeros((self._tokens,), _as_bytes(x).dtype, "buffer_tokens")
            like = self._like[name]
            if (like.dtype, like.shape[1:]) != (x.dtype, x.shape[1:]):
                raise FormatError(
                    f"{name}: expected rows of {like.dtype} {tuple(like.shape[1:])} as before, got {x.dtype} "
                    f"{tuple(x.shape[1:])}. Pass layers=[…] to the data set"
                )
            self._memory[name][places] = _as_bytes(x[start : start + len(places)])

    def get(self, places: Places) -> RowArrays:
        return {name: _from_bytes(memory.take(places), self._like[name]) for name, memory in self._memory.items()}

    def digest(self, places: Places, keys: Sequence[str]) -> str:
        """The ``digest`` of the token ids at ``places``, which are of the samples ``keys``."""
        return digest(self._memory["input_ids"].take(places), *keys)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], argument: str) -> np.ndarray[Any, Any]:
    """Return zeros, one row for each token. They take memory only when they are written.

    Raises:
        ConfigError: they do not fit into memory. ``argument`` determines their number.
    """
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError):  # ValueError: more than numpy can address
        raise ConfigError(
            f"{argument}: expected a buffer that fits into memory, got {shape[0]} tokens of "
            f"{math.prod(shape[1:]) * dtype.itemsize} bytes. Use a smaller number"
        ) from None


def _as_bytes(x: Any) -> np.ndarray[Any, Any]:
    """Rows as bytes, void ``[n]``. numpy copies these several times as fast as torch copies rows of bf16."""
    if not isinstance(x, np.ndarray):
        import torch

        x = x.reshape(len(x), -1).view(torch.uint8).numpy()
    x = np.ascontiguousarray(x).reshape(len(x), math.prod(x.shape[1:]))
    return x.view(np.dtype((np.void, x.shape[1] * x.itemsize)))[:, 0]


def _from_bytes(rows: np.ndarray[Any, Any], like: Any) -> Any:
    """Convert ``_as_bytes``'s array back to the dtype and row shape of ``like``."""
    if isinstance(like, np.ndarray):
        return rows.view(like.dtype).reshape(len(rows), *like.shape[1:])
    import torch

    return torch.from_numpy(rows.view(np.uint8)).view(like.dtype).view(len(rows), *like.shape[1:])


class Refill:
    """Reads the next block in small steps while the batches of the current round are yielded.

    ``steps``: each step reads the tokens of one batch. It yields ``None``, or the block if the step completes it.
    """

    def __init__(self, steps: Iterator[Block | None], steps_of_block: int):
        self._steps, self._all = steps, steps_of_block
        self._done, self._ended = 0, False
        self._block: Block | None = None

    def read(self, part: float) -> None:
        """Read until the fraction ``part`` (0 to 1) of the block has been read."""
        while self._block is None and not self._ended and self._done < part * self._all:
            self._done += 1
            try:
                self._block = next(self._steps)
            except StopIteration:
                self._ended = True

    def take(self) -> Block | None:
        """Read the rest of the block and return it. The last block may have fewer tokens; after it, ``None``."""
        self.read(1)
        block, self._block, self._done = self._block, None, 0
        return block


def share_sizes(block_tokens: int, batch_tokens: int, keep: float) -> list[int]:
    """Number of tokens of a block that each round yields, in whole batches.

    After each round the fraction ``keep`` of the remaining tokens stays. The last of at most eight shares takes the
    rest, so that a resume needs at most eight blocks. With an unlimited number of shares a token could stay for any
    number of rounds, and a resume would have to repeat all rounds.
    """
    left = block_tokens // batch_tokens
    sizes: list[int] = []
    while left:
        give = left if keep == 0 or len(sizes) == MOST_SHARES - 1 else min(left, max(1, round(left * (1 - keep))))
        sizes.append(give * batch_tokens)
        left -= give
    return sizes


def most_lots(sizes: Sequence[int], batch_tokens: int) -> int:
    """Number of lots of ``batch_tokens`` slots that a mixture needs: for the buffer, one refill and the next batch."""
    buffer = sum(sum(sizes[first:]) for first in range(len(sizes)))
    return (buffer + sum(sizes)) // batch_tokens + 1


def divide(places: Places, sizes: Sequence[int], seed: Sequence[int]) -> list[Places]:
    """Divide ``places`` at random into shares of these sizes."""
    ends = np.cumsum(sizes)
    return np.split(np.random.default_rng(seed).permutation(places), ends[ends < len(places)])


def draw(shares: Sequence[Places], batch_tokens: int, rng: np.random.Generator) -> Iterator[Places]:
    """Yield the batches of a round: uniform draws without replacement from all shares.

    Each share is already in random order, so a batch takes one range of each share.
    """
    left = np.array([len(share) for share in shares], np.int64)
    at = np.zeros_like(left)
    while total := int(left.sum()):
        taken = rng.multivariate_hypergeometric(left, min(batch_tokens, total), method="marginals")
        yield np.concatenate([share[a : a + n] for share, a, n in zip(shares, at, taken, strict=True)])
        left, at = left - taken, at + taken


def ahead(source: Iterator[Block | None], depth: int, left: Event) -> Generator[Block | None, None, None]:
    """Yield the steps of ``source``. A thread runs up to ``depth`` steps ahead.

    Sets ``left`` when the consumer stops: a step that searches for tokens could otherwise go on for an epoch.
    """
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="hsx-mix")
    exiting = sys.is_finalizing  # as ``read_ahead``
    try:
        queue: deque[Future[Any]] = deque(pool.submit(next, source, end) for _ in range(depth))
        while (step := queue.popleft().result()) is not end:
            queue.append(pool.submit(next, source, end))
            yield step
    finally:
        if not exiting():
            left.set()
            pool.shutdown(wait=False, cancel_futures=True)


def digest(ids: Any, *keys: str) -> str:
    """Hashes of token ids and of their samples' keys, 32 hex digits. States of earlier versions have the first 16."""
    samples = "\0".join(keys).encode("utf-8", "surrogatepass")
    return "".join(hashlib.blake2b(x, digest_size=8).hexdigest() for x in (np.ascontiguousarray(ids).data, samples))


def matches(found: str, stored: str) -> bool:
    """Whether a ``digest`` is the one in a state. Samples of equal token ids have different keys."""
    return found[: len(stored)] == stored if stored else not found
