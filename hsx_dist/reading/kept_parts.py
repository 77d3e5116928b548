"""The headers of the parts that a reader opened last, and the errors of those that it could not open."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from hsx_dist.errors import FormatError, NotFound, SampleConsumed, UnknownCodec
from hsx_dist.format.codecs import CODECS
from hsx_dist.format.container import Part
from hsx_dist.format.header_source import PARSED
from hsx_dist.text import bounded

#: Limit of the memory of the kept headers and token ids. One part is always kept. Their number has no limit: in a run
#: of many writers, neighbouring samples are stored in as many parts, and a header may be larger than a sample.
_KEPT_BYTES = 256 << 20
#: Memory of a part besides.
_PART = 16 << 10
#: Up to this many bytes of token ids are fetched and kept with the header, in the same request. Reading a sample then
#: costs only one more request.
MOST_IDS = 1 << 20
#: A part's error is raised for its other samples during these seconds. Opening it for each of them would take time and
#: transfer of their number times the header. A damaged part may be restored, and a lost part may appear again.
_DAMAGED_S, _MISSING_S = 60.0, 5.0
#: Limit of the number of kept errors.
_MOST_ERRORS = 1 << 12
_Lasting = type[FormatError | NotFound | SampleConsumed]


class KeptParts:
    """Cache of the parts opened last. If several threads want the same part, one opens it and all get its error.

    A part that is damaged or missing is not opened again for some seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Part] = OrderedDict()
        self._nbytes = 0
        self._opening: dict[str, Future[Part]] = {}
        # Part → the time until which its error counts, the error's type and text, and the number of codecs. The error
        # itself has frames, which hold fetched bytes. The part may need a codec that is registered later.
        self._errors: OrderedDict[str, tuple[float, _Lasting, str, int]] = OrderedDict()

    def get(self, name: str, open_part: Callable[[str], Part]) -> Part:
        """Return the part ``name``, from ``open_part(name)`` if it is not kept. Raise its kept error, if it has one."""
        mine: Future[Part] = Future()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            if name in self._errors:
                until, error, message, known = self._errors[name]
                if self._clock() < until and not (error is UnknownCodec and known != len(CODECS)):
                    raise error(message)
                del self._errors[name]
            others = self._opening.get(name)
            if others is None:
                self._opening[name] = mine
        if others is not None:
            return others.result()
        try:
            mine.set_result(open_part(name))
        except BaseException as e:
            mine.set_exception(e)
            if isinstance(e, FormatError | NotFound | SampleConsumed):
                self._keep_error(name, e)
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

    def forget_errors(self) -> None:
        """Open parts again that could not be opened."""
        with self._lock:
            self._errors.clear()

    def _keep_error(self, name: str, error: FormatError | NotFound | SampleConsumed) -> None:
        seconds = _DAMAGED_S if isinstance(error, FormatError) else _MISSING_S
        with self._lock:
            self._errors[name] = self._clock() + seconds, type(error), bounded(error), len(CODECS)
            if len(self._errors) > _MOST_ERRORS:
                self._errors.popitem(last=False)


def nbytes_of(part: Part) -> int:
    """Return the memory of a part's header and token ids."""
    return PARSED * part.header_bytes + part.front_bytes + _PART
