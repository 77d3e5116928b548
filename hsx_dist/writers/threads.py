"""A pool of threads in the engine's process: without Ray, for one machine and for servers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from hsx_dist.errors import HsxError
from hsx_dist.logger import get_logger
from hsx_dist.page import Page
from hsx_dist.writers.sink import PartSink

log = get_logger(__name__)


class ThreadSender:
    """Threads that encode pages into one ``PartSink``.

    The ring bounds the queue: a page's buffer is released only after the page is encoded.
    """

    def __init__(self, sink: PartSink, threads: int = 2):
        self.sink = sink
        self._queue: queue.SimpleQueue[tuple[Page, int, Callable[[Page], None]] | None] = queue.SimpleQueue()
        self._open = 0
        self._idle = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"hsx-encode-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        with self._idle:
            self._open += len(pages)
        for page in pages:
            self._queue.put((page, self.sink.arrive(), release))

    def _work(self) -> None:
        while self._encode_next():
            pass

    def _encode_next(self) -> bool:
        """Encode the next page. False at the end. A method, so that an idle thread holds no segment's metadata."""
        item = self._queue.get()
        if item is None:
            return False
        page, arrival, release = item
        try:
            self.sink.add(page, arrival)
        except HsxError as e:
            # The sink has reported ``Lost`` or is fenced; the receipts show which samples are missing.
            log.debug("page %d of %s was not encoded: %s", page.chunk, page.segment, e)
        except Exception:
            log.exception("page %d of %s was not encoded", page.chunk, page.segment)
        finally:
            release(page)
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
        return True

    def flush(self) -> None:
        with self._idle:
            while self._open:
                self._idle.wait()

    def close(self) -> None:
        self.flush()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
