"""The headers of the parts that a reader opened last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from hsx_dist.format.container import Part

#: Limit of the memory of the kept headers and token ids. One part is always kept. Their number has no limit: in a run
#: of many writers, neighbouring samples are stored in as many parts, and a header may be larger than a sample.
_KEPT_BYTES = 256 << 20
#: Memory of a part besides.
_PART = 16 << 10
#: Memory of a parsed header for each of its bytes. Measured for headers of many samples with one layer: 7.4.
_PARSED = 8
#: Up to this many bytes of token ids are fetched and kept with the header, in the same request. Reading a sample then
#: costs only one more request.
MOST_IDS = 1 << 20


class KeptParts:
    """Cache of the parts opened last. If several threads want the same part, one opens it and all get its error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Part] = OrderedDict()
        self._nbytes = 0
        self._opening: dict[str, Future[Part]] = {}

    def get(self, name: str, open_part: Callable[[str], Part]) -> Part:
        """Return the part ``name``, from ``open_part(name)`` if it is not kept."""
        mine: Future[Part] = Future()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            others = self._opening.get(name)
            if others is None:
                self._opening[name] = mine
        if others is not None:
            return others.result()
        try:
            mine.set_result(open_part(name))
        except BaseException as e:
            mine.set_exception(e)
            raise
        finally:
            with self._lock:
                del self._opening[name]
                if mine.exception() is None:
                    self._kept[name] = mine.result()
                    self._nbytes += nbytes_of(mine.result())
                    while len(self._kept) > 1 and self._nbytes > _KEPT_BYTES:
                        self._nbytes -= nbytes_of(self._kept.popitem(last=False)[1])
        return mine.result()


def nbytes_of(part: Part) -> int:
    """Return the memory of a part's header and token ids."""
    return _PARSED * part.header_bytes + part.front_bytes + _PART
