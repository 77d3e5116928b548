"""How one part becomes durable.

The order that makes a sample exist: the part is stored whole under a name of its own; then the attempt is checked to be
the newest; then the receipt is stored, in a log that another process may have sealed. Only then is the driver told.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import AlreadyExists, Denied, FormatError, NotFound, SampleConflict, StoreError, Unavailable
from hsx_dist.format.container import EncodedPart, EncodedSegment, Part, with_expires
from hsx_dist.format.identity import same_sample
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.names import part_name
from hsx_dist.format.receipt_log import ReceiptLog
from hsx_dist.format.segments import SegmentTable, segment_numbers
from hsx_dist.logger import get_logger
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.units import bytes_text
from hsx_dist.page import object_name, token_hash
from hsx_dist.store import Store
from hsx_dist.store.base import Conditional, replaces_conditionally, version_of
from hsx_dist.text import printable
from hsx_dist.writers.events import Stored

log = get_logger(__name__)

#: A put that finds an object which it can neither read nor renew tries so many times.
_MOST_TRIES = 10
_PAUSE_S = 0.05
#: An object that could not be renewed stands for a request if it does not expire before readers have come.
_STILL_THERE_S = 60.0
#: A store that could not be probed for conditional puts is probed again after so long.
_PROBE_AGAIN_S = 600.0
#: More than can be under way at once: one that is older than so many names cannot come any more.
_REMEMBERED = 4096
#: Locks that names share. More than the threads that put, so that two names seldom wait for one lock.
_STRIPES = 64


class _PutOrder:
    """Puts of one name in turn, and none after a later one's: of two objects under a name that clients chose, the later
    one stays. Thread-safe."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    @contextmanager
    def take(self, name: str, number: int) -> Iterator[bool]:
        """Whether ``number``, of those that came for ``name``, is still to be stored; within the block nobody else
        stores that name. A block that raises has stored nothing."""
        with self._stripes[hash(name) % _STRIPES]:
            with self._lock:
                newest = self._newest.get(name, -1)
            yield number > newest
            with self._lock:
                self._newest[name] = max(newest, number)
                self._newest.move_to_end(name)
                if len(self._newest) > _REMEMBERED:
                    self._newest.popitem(last=False)


class PartCommitter:
    """Stores the parts of one writer's one life, several at once.

    ``writer``: a name that no other life of any writer has. ``attempt`` 0: there is no run, and no receipt. ``alone``:
    each part is one sample; without a run the object is named after its key, or as its request says. ``about``: what
    parts say of the run.
    """

    def __init__(self, store: Store, writer: str, *, attempt: int, alone: bool, about: Mapping[str, Any], meter: Meter):
        self._store = store
        self._writer = writer
        self._attempt = attempt
        self._alone = alone
        self._about = about
        self._meter = meter
        self._put_order = _PutOrder()
        self._renews: bool | None = None  # whether the store has conditional puts, once that is known
        self._probe_after = 0.0
        self._renewing = threading.Lock()  # a stored object is in memory meanwhile: one at a time
        self._log = ReceiptLog(store, attempt, writer)

    def commit(
        self, segments: Sequence[EncodedSegment], part: EncodedPart, number: int, arrival: int
    ) -> Receipt | Stored:
        """Store ``part``, made of ``segments``, and say what proves it. It returns when that is durable.

        ``number``: the part's, of this writer. ``arrival``: of the request that a sample alone was of; where several
        name one path the latest one's object stays.

        Raises:
            Fenced: a newer attempt has taken over.
            SampleConflict: a sample alone, and its key stands for something else.
            StoreError: as the store says.
        """
        name = self._name(segments[0], number)
        before = time.monotonic()
        try:
            if self._attempt:
                self._store.put(name, part.buffers)
            elif segments[0].segment.name:
                with self._put_order.take(name, arrival) as newest:
                    # Else a later request of this path has stored its own, as this one would be replaced.
                    if newest:
                        self._store.put(name, part.buffers)
            else:
                # In turn: a put that lets an object live longer must replace no other sample, stored since it looked.
                with self._put_order.take(name, arrival):
                    self._put_new(name, part.buffers, segments)
        finally:
            self._meter.put_took(time.monotonic() - before)
        if not self._attempt:
            return Stored(tuple(s.segment for s in segments), name)
        receipt = self._log.append(self._receipt(segments, part, name))
        log.info("stored %d segments, %s", len(segments), bytes_text(part.size), extra={"part": name})
        return receipt

    def _name(self, first: EncodedSegment, number: int) -> str:
        sample = object_name(first.segment.key) if self._alone else ""
        if self._attempt:
            return part_name(self._attempt, self._writer, number, sample)
        return first.segment.name or f"{sample}.safetensors"

    def _put_new(self, name: str, buffers: Sequence[Any], segments: Sequence[EncodedSegment]) -> None:
        """Store an object whose name follows from its key. Where there is one already it must be the same sample; it
        stays, and lives at least as long as this one would.

        Raises:
            SampleConflict: the key stands for something else.
            Unavailable: the object that is there expires, and another process keeps this one from renewing it.
        """
        for left in reversed(range(_MOST_TRIES)):
            try:
                self._store.put_if_absent(name, buffers)
                return
            except AlreadyExists:
                try:
                    if self._keep(name, segments, last=not left):
                        return
                except NotFound:  # a client or hsx gc deleted it in between; each time: a folder, or a broken link
                    if not left:
                        raise
            time.sleep(_PAUSE_S)
        raise Unavailable(
            f"{self._store.url}/{name}: expected an object that can be renewed before it expires, another process "
            "locks or replaces it each time. Find the process that locks this object"
        )

    def _keep(self, name: str, segments: Sequence[EncodedSegment], *, last: bool) -> bool:
        """Renew the object that is there, which must be the same sample. Without conditional puts it keeps its end:
        a put without a condition could replace another client's object. False: another process replaced or locked it.
        At the ``last`` try it keeps an end that is still to come: any user who may read a file can lock it.

        Raises:
            NotFound: there is none any more.
            SampleConflict: it is another sample, or it cannot be read.
        """
        version = version_of(self._store, name)
        try:
            part = Part.open(self._store, name)
            same = same_sample(part, segments, self._about)
        except FormatError:
            # It was read in several requests: of two objects, if it was replaced between them.
            if version is not None and version != version_of(self._store, name):
                return False
            same = False
        if not same:
            raise SampleConflict(
                f"{self._store.url}/{name}: expected a key that is used once, or again for the same sample; there is "
                "another sample of that key. Choose another key"
            ) from None
        before, ours = (meta.get("expires") for meta in (part.segments[0].segment.meta, segments[0].segment.meta))
        if before is None or (ours is not None and ours <= before):
            return True
        if not self._can_renew() or version is None:
            return True
        assert isinstance(self._store, Conditional)
        try:
            with self._renewing:
                renewed = with_expires(self._store.get(name, part.size + 1), part, ours)
                if renewed is not None and self._store.put_version(name, renewed, version):
                    return True
        except Denied as e:
            log.warning("%s keeps its end: %s", printable(name), e)
            return True
        if last and before > time.time() + _STILL_THERE_S:
            log.warning("%s keeps its end: another process locks or replaces it each time", printable(name))
            return True
        return False

    def _can_renew(self) -> bool:
        """Whether the store has conditional puts. What a probe says is believed for good if the store did what it was
        asked, and for a while if the probe failed."""
        if self._renews is not None:
            return self._renews
        if time.monotonic() < self._probe_after:
            return False
        try:
            self._renews = replaces_conditionally(self._store)
        except StoreError as e:
            if e.retryable:
                raise
            self._probe_after = time.monotonic() + _PROBE_AGAIN_S
            log.warning("objects of keys that are used again keep their end: %s", e)
            return False
        if not self._renews:
            log.warning(
                "%s has no conditional puts: objects of keys that are used again keep their end", self._store.url
            )
        return self._renews

    def _receipt(self, segments: Sequence[EncodedSegment], part: EncodedPart, name: str) -> Receipt:
        """Of a stored part, without its number."""
        proofs = SegmentTable(
            [s.segment.key for s in segments],
            [segment_numbers(s.segment, s.raw_nbytes, s.nbytes, s.segment.row) for s in segments],
            [(token_hash(s.token_ids), s.segment.sample_hash) for s in segments],
        )
        return Receipt(
            attempt=self._attempt,
            writer=self._writer,
            seq=0,
            part=name,
            size=part.size,
            crc32c=part.crc32c,
            header_bytes=part.header_bytes,
            raw_bytes=part.raw_bytes,
            segments=proofs,
            rows=(),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
