"""The headers of the parts that a reader opened last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from hsx_dist.format.container import Part

#: Headers kept. Neighbouring samples of a run are stored in the same few parts.
_HEADERS = 64
#: Limit of the memory of the kept headers and token ids, for headers of many samples. One header is always kept.
_KEPT_BYTES = 512 << 20
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
                    while len(self._kept) > 1 and (len(self._kept) > _HEADERS or self._nbytes() > _KEPT_BYTES):
                        self._kept.popitem(last=False)
        return mine.result()

    def _nbytes(self) -> int:
        return sum(_PARSED * part.header_bytes + MOST_IDS for part in self._kept.values())
