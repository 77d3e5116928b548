"""Durable storage of one part.

The order of the steps:

1. store the complete part under a unique name;
2. check that no newer attempt exists;
3. store the receipt, in a log that another process may have sealed;
4. report the receipt to the driver.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import (
    AlreadyExists,
    Denied,
    FormatError,
    NotFound,
    SampleConflict,
    SampleExpired,
    StoreError,
    Unavailable,
)
from hsx_dist.format.container import EncodedPart, EncodedSegment, Part, with_expires
from hsx_dist.format.expires import STILL_THERE_S, expires_by
from hsx_dist.format.identity import same_sample
from hsx_dist.format.json_objects import number
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

#: Attempts of a put that finds an object which it can neither read nor renew.
_MOST_TRIES = 10
#: Attempts if that object does not expire soon. Other samples of its key wait meanwhile, and hold memory.
_TRIES = 3
_PAUSE_S = 0.05
#: Seconds until a store is probed again for conditional puts after a failed probe.
_PROBE_AGAIN_S = 600.0
#: Names whose newest put is remembered. More than can be in flight, so that no older put of a forgotten name follows.
_REMEMBERED = 4096


class _PutOrder:
    """The number of the newest put of each name. Thread-safe. Puts of one name do not overlap.

    If clients choose one name for two requests, the later request's object stays.
    """

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def is_newest(self, name: str, number: int) -> bool:
        with self._lock:
            return number > self._newest.get(name, -1)

    def stored(self, name: str, number: int) -> None:
        with self._lock:
            self._newest[name] = number
            self._newest.move_to_end(name)
            if len(self._newest) > _REMEMBERED:
                self._newest.popitem(last=False)


class PartCommitter:
    """Stores the parts of one incarnation of a writer, several at once.

    ``writer``: a name that no other incarnation of any writer has. ``attempt`` 0: there is no run, and no receipt.
    ``alone``: each part is one sample; without a run its request names the object, by default after the sample's key.
    ``about``: metadata of the run for every part.
    """

    def __init__(self, store: Store, writer: str, *, attempt: int, alone: bool, about: Mapping[str, Any], meter: Meter):
        self._store = store
        self._writer = writer
        self._attempt = attempt
        self._alone = alone
        self._about = about
        self._meter = meter
        self._put_order = _PutOrder()
        self._renews: bool | None = None  # whether the store has conditional puts; None: not known yet
        self._probe_after = 0.0
        self._renewing = threading.Lock()  # one at a time: a renewal holds the stored object in memory
        self._log = ReceiptLog(store, attempt, writer)

    def commit(
        self, segments: Sequence[EncodedSegment], part: EncodedPart, number: int, arrival: int
    ) -> Receipt | Stored:
        """Store ``part``, made of ``segments``. Returns its proof when part and proof are durable.

        Without a run, calls for one ``name`` must not overlap: a renewal must not replace another sample that was
        stored after its check.

        ``number``: the part's number within this writer. ``arrival``: the order of the sample's request, for parts of
        one sample; if several requests name one path, the latest one's object stays.

        Raises:
            Fenced: a newer attempt has taken over.
            FormatError: the part is one sample, and the existing object of its key cannot be read.
            SampleConflict: the part is one sample, and its key belongs to another sample.
            SampleExpired: the key's object has the same sample, but has expired and cannot be renewed.
            StoreError: the store's error.
        """
        name = self.name(segments[0], number)
        before = time.monotonic()
        try:
            if self._attempt:
                self._store.put(name, part.buffers)
            elif segments[0].segment.name:
                # Otherwise a later request of this path has stored its object, which would replace this one.
                if self._put_order.is_newest(name, arrival):
                    self._store.put(name, part.buffers)
                    self._put_order.stored(name, arrival)
            else:
                self._put_new(name, part.buffers, segments)
        finally:
            self._meter.put_took(time.monotonic() - before)
        if not self._attempt:
            return Stored(tuple(s.segment for s in segments), name)
        receipt = self._log.append(self._receipt(segments, part, name))
        log.info("part stored: segments=%d, size=%s", len(segments), bytes_text(part.size), extra={"part": name})
        return receipt

    def name(self, first: EncodedSegment, number: int) -> str:
        """The name of the object of a part that begins with the segment ``first``."""
        sample = object_name(first.segment.key) if self._alone else ""
        if self._attempt:
            return part_name(self._attempt, self._writer, number, sample)
        return first.segment.name or f"{sample}.safetensors"

    def _put_new(self, name: str, buffers: Sequence[Any], segments: Sequence[EncodedSegment]) -> None:
        """Store an object whose name follows from its key.

        An existing object must be the same sample. It stays, and is renewed to expire no earlier than the new one.

        Raises:
            FormatError: the existing object cannot be read.
            SampleConflict: the key belongs to another sample.
            SampleExpired: the existing object has expired and cannot be renewed.
            Unavailable: the existing object expires, and another process prevents its renewal.
        """
        for tried in range(1, _MOST_TRIES + 1):
            try:
                self._store.put_if_absent(name, buffers)
                return
            except AlreadyExists:
                try:
                    if self._keep(name, segments, last=tried >= _TRIES):
                        return
                except NotFound:  # just deleted by a client or hsx gc; at every attempt: a folder or a broken link
                    if tried == _MOST_TRIES:
                        raise
            time.sleep(_PAUSE_S)
        raise Unavailable(
            f"{self._store.url}/{name}: expected an object that can be renewed before it expires, got an object that "
            "is damaged, or that another process locks or replaces at every attempt. Delete it, or find that process"
        )

    def _keep(self, name: str, segments: Sequence[EncodedSegment], *, last: bool) -> bool:
        """Renew the existing object, which must be the same sample.

        Returns False if another process replaced or locked the object, or if it came back damaged. The object keeps its
        expiry time if the store has no conditional puts: an unconditional put could replace another client's object. At
        the ``last`` attempts it also keeps its expiry time: every user who may read a file can lock it. An object that
        is not renewed satisfies the request only if it exists for another ``STILL_THERE_S``.

        Raises:
            NotFound: the object was deleted.
            FormatError: it cannot be read here, so it is not known whether it is another sample.
            SampleConflict: it is another sample.
            SampleExpired: it has expired, and the store does not let this process renew it.
        """
        version = self._version(name)
        try:
            part = Part.open(self._store, name)
            same = same_sample(part, segments, self._about)
        except FormatError:
            # The object is read in several requests. If it was replaced in between, the bytes are of two objects.
            if version is not None and version != self._version(name):
                return False
            raise  # no conflict: its codec may be unknown here only, or the answer may be wrong for a moment
        if not same:
            raise SampleConflict(
                f"{self._store.url}/{name}: expected a new key, or the key of the same sample, got the key of another "
                "sample. Choose another key"
            )
        before, ours = (meta.get("expires") for meta in (part.segments[0].segment.meta, segments[0].segment.meta))
        if before is None or number(before) is not None or (ours is not None and ours <= before):
            return True
        cannot = True
        if self._can_renew() and version is not None:
            assert isinstance(self._store, Conditional)
            try:
                with self._renewing:
                    renewed = with_expires(self._store.get(name, part.size + 1), part, ours)
                    if renewed is not None and self._store.put_version(name, renewed, version):
                        return True
                cannot = False
            except Denied as e:
                log.warning("object is not renewed: name=%s: %s", printable(name), e)
        if expires_by(part.segments[0].segment.meta, time.time() + STILL_THERE_S):
            if cannot:
                raise SampleExpired(
                    f"{self._store.url}/{name}: expected an object that can be renewed before it expires, got an "
                    "expired object that cannot be renewed. Delete it, or use another key"
                )
            return False
        if last and not cannot:
            log.warning("object is not renewed: name=%s: it is damaged, locked, or replaced again", printable(name))
        return cannot or last

    def _version(self, name: str) -> str | None:
        """Return the object's version, or None if this process cannot learn it, and therefore not renew the object."""
        try:
            return version_of(self._store, name)
        except NotFound:
            raise
        except StoreError as e:
            if e.retryable:
                raise
            log.warning("the version of an object is not known: name=%s: %s", printable(name), e)
            return None

    def _can_renew(self) -> bool:
        """Whether the store has conditional puts.

        A probe's result is final. After a probe with an error, the store is probed again in ``_PROBE_AGAIN_S``.
        """
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
            log.warning("objects of reused keys are not renewed: %s", e)
            return False
        if not self._renews:
            log.warning("objects of reused keys are not renewed: %s has no conditional puts", self._store.url)
        return self._renews

    def _receipt(self, segments: Sequence[EncodedSegment], part: EncodedPart, name: str) -> Receipt:
        """The receipt of a stored part, without its number."""
        proofs = SegmentTable(
            [s.segment.key for s in segments],
            [segment_numbers(s.segment, s.raw_nbytes, s.nbytes, s.segment.row) for s in segments],
            [(token_hash(s.token_ids), s.segment.sample_hash, s.segment.content) for s in segments],
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
