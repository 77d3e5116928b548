"""Reading ahead with threads: results in the order asked, and no more bytes under way than allowed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from hsx_dist.format.container_read import Empty, new_states
from hsx_dist.memory.blocks import BlockPool
from hsx_dist.page import CARRIER

T = TypeVar("T")
R = TypeVar("R")


def read_ahead(
    work: Callable[[T], R], items: Iterable[tuple[T, int]], *, threads: int, max_bytes: int
) -> Iterator[tuple[T, Future[R]]]:
    """``work`` of each item, in threads and ahead of the consumer; yields ``(item, done future)`` in the items' order.

    ``items``: each with the bytes that its result takes, or will at most. What is being made, what is made and not yet
    asked for, and what was yielded last, stay below ``max_bytes`` together, but for a single item that is larger. An
    item ``None`` is a pause of the source: what lies behind it is asked for only when everything before is consumed.
    An error of the source is raised where it stands in the order: behind all that came before.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hsx-read")
    queue: deque[tuple[T, int, Future[R]]] = deque()
    source = iter(items)
    held = 0
    waiting: tuple[T, int] | None = None
    error: Exception | None = None
    ended = False
    try:
        while True:
            # Twice the threads: one is made while another waits to be asked for.
            while not ended and len(queue) < 2 * threads:
                if waiting is None:
                    try:
                        waiting = next(source, None)
                    except Exception as e:  # noqa: BLE001 - raised below, in its place
                        error = e
                    if waiting is None:
                        ended = True
                        break
                item, nbytes = waiting
                if queue and (item is None or held + nbytes > max_bytes):
                    break
                waiting = None
                if item is not None:
                    queue.append((item, nbytes, pool.submit(work, item)))
                    held += nbytes
            if not queue:
                if error is not None:
                    raise error
                return
            item, nbytes, future = queue.popleft()
            future.exception()  # wait; the consumer looks at the outcome
            yield item, future
            del future
            held -= nbytes
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def reused_memory(max_bytes: int) -> Empty:
    """Memory for the states of items, used again once nothing refers to an item: page faults cost as much as decoding.

    Of ``max_bytes``, as ``read_ahead`` has them, the other half is left to what is fetched and not yet decoded.
    """
    limit = max_bytes // 2
    blocks = BlockPool(limit)

    def empty(shape: tuple[int, int, int], dtype: str) -> np.ndarray[Any, Any]:
        carrier = np.dtype(CARRIER[dtype])
        nbytes = math.prod(shape) * carrier.itemsize
        return blocks.take(nbytes).view(carrier).reshape(shape) if nbytes <= limit else new_states(shape, dtype)

    return empty
