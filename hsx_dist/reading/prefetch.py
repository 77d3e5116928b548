"""Read ahead with threads, in order and within a limit of bytes."""

from __future__ import annotations

import math
import sys
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
    """Call ``work`` for each item in threads, ahead of the consumer. Yield ``(item, done future)`` in order.

    ``items``: each item with the maximum size of its result in bytes. ``max_bytes`` limits the sum over running calls,
    finished results, and the result yielded last. A single larger item is still processed.

    An item ``None`` is a pause: items after it are requested only when all earlier ones are consumed. An error of the
    source is raised after all items that precede it have been yielded.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hsx-read")
    exiting = sys.is_finalizing  # a local name: at exit, Python may clear modules before it ends this generator
    queue: deque[tuple[T, int, Future[R]]] = deque()
    source = iter(items)
    held = 0
    waiting: tuple[T, int] | None = None
    error: Exception | None = None
    ended = False
    try:
        while True:
            # Twice the threads: for each thread one result in work and one finished result for the consumer.
            while not ended and len(queue) < 2 * threads:
                if waiting is None:
                    try:
                        waiting = next(source, None)
                    except Exception as e:  # noqa: BLE001 - raised below, after the items that precede it
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
            future.exception()  # only wait: the consumer handles an error
            yield item, future
            del future
            held -= nbytes
    finally:
        # Without waiting: the garbage collector may end an abandoned iteration in a thread that holds a reader's lock.
        if not exiting():  # at exit the threads have ended, and ``shutdown`` may lack the module ``queue``
            pool.shutdown(wait=False, cancel_futures=True)


def reused_memory(max_bytes: int) -> Empty:
    """Return an allocator for the states of items. It reuses memory when nothing refers to the item any more.

    Page faults of new memory cost as much as decoding. The limit is half of ``max_bytes`` (of ``read_ahead``), because
    fetched bytes that are not yet decoded need the other half.
    """
    limit = max_bytes // 2
    blocks = BlockPool(limit)

    def empty(shape: tuple[int, int, int], dtype: str) -> np.ndarray[Any, Any]:
        carrier = np.dtype(CARRIER[dtype])
        nbytes = math.prod(shape) * carrier.itemsize
        return blocks.take(nbytes).view(carrier).reshape(shape) if nbytes <= limit else new_states(shape, dtype)

    return empty
