"""``PartSink``: takes pages, and stores durable parts. Needs no Ray. Every pool of writers runs it."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hsx_dist.errors import EngineError, Fenced, HsxError, SampleConflict, StoreError, Unavailable
from hsx_dist.format.codecs import Codec
from hsx_dist.format.container import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.logger import get_logger
from hsx_dist.memory.blocks import BlockPool
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.store import Store
from hsx_dist.store.base import Buffer
from hsx_dist.text import bounded, shown_error
from hsx_dist.writers.committer import PartCommitter
from hsx_dist.writers.daemon import DaemonPool
from hsx_dist.writers.events import Event, Lost, reason_not_stored
from hsx_dist.writers.filling import Filling, OpenPart, bytes_besides, first_page_besides, tokens_of
from hsx_dist.writers.sample_columns import SampleColumns
from hsx_dist.writers.sanity_checks import SanityChecks

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Settings of a sink.

    Attributes:
        about: metadata of every part (model, revision, versions …).
        attempt: 0: there is no run, and objects have no receipts (a server's ``layout="sample"``).
        max_bytes: limit of raw bytes being encoded plus encoded bytes not yet stored, in a run with the segments' other
            memory. One segment of every sender and one part are always accepted.
        uploads: number of parts stored at once.
        stale_seconds: a run's unfinished segment without a new page for this long is dropped. Time in which the store
            accepts no part does not count, because the pages wait then.
        on_bad_rows: what happens to segments with non-finite rows or all-zero layers. ``"flag"`` stores them with the
            findings in their ``meta``; ``"fail"`` reports them as lost.
    """

    codec: Codec
    about: Mapping[str, Any]
    writer: str
    attempt: int = 0
    layout: Literal["part", "sample"] = "part"
    part_bytes: int = 256 << 20
    part_seconds: float = 60.0
    max_bytes: int = 1 << 30
    uploads: int = 4
    stale_seconds: float = 900.0
    on_bad_rows: Literal["flag", "fail"] = "flag"


#: A part is sealed when its header reaches this size: readers fetch headers whole, and safetensors allows 100 MB.
MAX_HEADER_BYTES = 32 << 20
#: After this share of ``stale_seconds`` without a stored part, the parts under way wait for an outage of the store.
_OUTAGE = 1 / 15


class PartSink:
    """Collects pages into segments, segments into parts, and stores the parts.

    ``add`` may be called from several threads. The calling thread encodes (zstandard releases the GIL); ``uploads``
    separate threads store parts.
    """

    def __init__(
        self, store: Store, options: SinkOptions, on_event: Callable[[Event], None], meter: Meter | None = None
    ):
        self.meter = Meter() if meter is None else meter
        self._opt = options
        self._on_event = on_event
        # A restarted writer must not reuse its earlier names, so each incarnation is a different writer.
        self.name = f"{options.writer}-{uuid.uuid4().hex[:8]}"
        self._committer = PartCommitter(
            store,
            self.name,
            attempt=options.attempt,
            alone=options.layout == "sample",
            about=options.about,
            meter=self.meter,
        )
        self._lock = threading.Condition()
        self._filling: dict[tuple[str, int, int, str], Filling] = {}
        self._columns = SampleColumns()
        self._open = OpenPart()
        self._held = 0
        self._line: set[int] = set()  # arrivals of pages that wait for room
        self._storing = 0  # parts
        self._stored_at = 0.0  # when a part last ended, or the first of those under way began
        self._looked_at = time.monotonic()
        self._served = 0.0  # seconds of the sink's life without outages of the store
        self._adding = 0  # accepted pages whose call has not ended
        self._dead: HsxError | None = None
        self._next_part = 1
        self._arrivals = itertools.count(1)
        self._blocks = BlockPool(options.max_bytes)
        self._uploads = DaemonPool(options.uploads, f"hsx-put-{options.writer}")
        self._closed = threading.Event()
        self._raw_bytes = self._stored_bytes = 0
        self.meter.watch("held_bytes", lambda: self._held)
        self.meter.watch("oldest_segment_seconds", self._oldest)
        self.meter.watch("ratio", lambda: self._raw_bytes / self._stored_bytes if self._stored_bytes else 0.0)
        self._clock = threading.Thread(target=self._seal_by_age, name=f"hsx-age-{options.writer}", daemon=True)
        self._clock.start()

    # -- pages in ------------------------------------------------------------------------------------------------

    def arrive(self) -> int:
        """Return the number of a page that is added later."""
        return next(self._arrivals)

    def add(self, page: Page, arrival: int | None = None) -> None:
        """Encode one page. After the call its buffer may be reused. Blocks while the sink holds ``max_bytes``.

        ``arrival``: the page's number, from ``arrive``, by default the next number. Needed if several threads add
        pages: the threads may take them in another order.

        Raises:
            Fenced, StoreError: the sink is dead; the page is not encoded.
        """
        came = time.monotonic()
        arrival = self.arrive() if arrival is None else arrival
        # All bytes besides states are counted with the segment's first page. A server's ring has counted its own.
        besides = first_page_besides(page) if self._opt.attempt and page.first else 0
        self._admit(page.nbytes + besides, arrival)
        admitted = time.monotonic()
        key = (*page.segment.id, page.segment.source)
        grown = -page.nbytes - besides
        filling = None
        done = False
        try:
            filling = self._filling_for(page, arrival)
            if filling.lost:
                return
            if page.error:
                raise EngineError(page.error)
            if self._opt.attempt and page.segment.columns > 1 and not page.segment.sample_hash:
                raise ValueError("expected the hash of the sample's token ids with several columns, got none")
            scan = SanityChecks.empty(len(page.layer_ids))
            size = filling.encoder.add(page, partial(scan.look, page.dtype))
            with self._lock:
                filling.scan.join(scan)
                # If several threads add to one segment, exactly one finds it complete *and* not yet removed.
                here = self._filling.get(key) is filling and not filling.lost
                if here:
                    grown += size + besides
                    filling.nbytes += size + besides
                done = here and filling.encoder.complete
                if done:
                    del self._filling[key]
                    self._drop_copies(page.segment)
            if done:
                grown -= self._finish(filling)
        except Exception as e:
            grown -= self._lose(filling, page.segment, e)
            raise
        finally:
            self._leave(filling, key, grown)
            self.meter.add("room_wait_seconds", admitted - came)
            self.meter.add("encode_seconds", time.monotonic() - admitted)

    def _leave(self, filling: Filling | None, key: Any, grown: int) -> None:
        """Update the counters after ``add``."""
        with self._lock:
            self._held += grown
            self._adding -= 1
            if filling is not None:
                filling.left -= 1
                if filling.lost and filling.left <= 0 and self._filling.get(key) is filling:
                    del self._filling[key]
            self._lock.notify_all()

    def _lose(self, filling: Filling | None, segment: Segment, error: Exception) -> int:
        """Mark the segment of a failed page as lost, and report it once. Its later pages are dropped.

        Returns the number of bytes that are freed.
        """
        with self._lock:
            told, freed = filling is not None and filling.lost, 0
            if filling is not None and not told:
                freed, filling.nbytes, filling.lost = filling.nbytes, 0, True
                filling.encoder = SegmentEncoder(self._opt.codec)  # frees the encoded bytes
        if not told:
            self._lose_sample(segment, bounded(shown_error(error)))
        return freed

    def _lose_sample(self, segment: Segment, why: str) -> None:
        """Report a segment as lost, with the columns that wait for it."""
        with self._lock:
            others = self._columns.lose(segment) if self._gathers(segment) else []
            self._held -= sum(map(self._held_by, others))
            self._lock.notify_all()
        self._on_event(Lost((segment, *(other.segment for other in others)), why))

    def _finish(self, filling: Filling) -> int:
        """Append a complete segment to the open part, or report it as lost.

        Returns the number of bytes that are no longer held. Negative if the segment takes more than its pages did.
        """
        segment = filling.encoder.finish()
        found = filling.scan.findings(segment.info.layer_ids)
        if not found:
            self._append(segment, filling.arrival)
            return filling.nbytes - self._held_by(segment)
        self.meter.add("nonfinite_rows", int(filling.scan.nonfinite.sum()))
        self.meter.add("zero_layers", int(filling.scan.zero.sum()))
        about = {"key": segment.segment.key, "row": segment.segment.row}
        log.warning("wrong hidden states: key=%s: %s", segment.segment.key, found, extra=about)
        if self._opt.on_bad_rows == "fail":
            self._lose_sample(segment.segment, f"its states are wrong: {found} (on_bad_rows is 'fail')")
            return filling.nbytes
        flagged = replace(segment.segment, meta={**segment.segment.meta, "bad": found})
        segment = replace(segment, info=replace(segment.info, segment=flagged))
        self._append(segment, filling.arrival)
        return filling.nbytes - self._held_by(segment)

    def _filling_for(self, page: Page, arrival: int) -> Filling:
        """Return the collected pages of this copy of the segment.

        A segment has several copies if its row was computed again after an engine died, or, without a run, if several
        requests have one key. Their pages may alternate.
        """
        segment = page.segment
        with self._lock:
            filling = self._filling.get((*segment.id, segment.source))
            if filling is None:
                filling = Filling(
                    SegmentEncoder(self._opt.codec, self._blocks.take, alone=self._opt.layout == "sample"),
                    self._served,
                    SanityChecks.empty(len(page.layer_ids)),
                    arrival,
                    left=-(-segment.num_tokens // page.chunk_tokens),
                    tokens=tokens_of(segment),
                )
                self._filling[*segment.id, segment.source] = filling
            filling.arrival = min(filling.arrival, arrival)
            filling.touched = self._served
            return filling

    def _drop_copies(self, segment: Segment) -> None:
        """Drop the unfinished copies of a complete segment. A copy of other tokens stays: its sample needs it."""
        if self._opt.attempt:  # without a run each copy belongs to a request that needs its event
            for key, other in list(self._filling.items()):
                if key[:3] == segment.id and other.tokens == tokens_of(segment):
                    del self._filling[key]
                    self._held -= other.drop()

    def _admit(self, nbytes: int, arrival: int) -> None:
        """Wait for room. Pages wait in line: otherwise small pages would pass a large one for as long as they come."""
        with self._lock:
            self._line.add(arrival)
            try:
                while arrival != min(self._line) or self._held + nbytes > self._opt.max_bytes:
                    if self._dead is not None:
                        raise self._dead
                    if arrival == min(self._line) and not self._storing and not self._adding:
                        if not self._open.segments:
                            break  # only unfinished segments are held: more pages must be accepted to complete them
                        self._seal_locked()  # nothing else frees memory: store the complete segments
                    self._lock.wait(1.0)
                if self._dead is not None:
                    raise self._dead
                self._held += nbytes
                self._adding += 1
            finally:
                self._line.remove(arrival)
                self._lock.notify_all()

    def _held_by(self, segment: EncodedSegment) -> int:
        return segment.nbytes + (bytes_besides(segment.info) if self._opt.attempt else 0)

    def _append(self, segment: EncodedSegment, arrival: int) -> None:
        header_bytes = segment.header_nbytes  # first: it raises if the sample's metadata does not fit into a header
        segments: Sequence[EncodedSegment] | None = [segment]
        with self._lock:
            if self._gathers(segment.segment):
                segments = self._columns.take(segment)
            if segments is None:
                self._held -= self._held_by(segment)
            elif segments:
                self._append_locked(segments, header_bytes, arrival)
        if segments is None:
            self._on_event(Lost((segment.segment,), "another column of its sample was lost"))

    def _append_locked(self, segments: Sequence[EncodedSegment], header_bytes: int, arrival: int) -> None:
        """Append segments to the open part. Several segments are all columns of one sample."""
        if not self._open.names.isdisjoint(segment.segment.id for segment in segments):
            # The row was recomputed after its engine died, and the open part still has the first copy.
            self._seal_locked()
        part = self._open
        part.add(segments, sum(map(self._held_by, segments)), header_bytes, arrival)
        full = part.nbytes >= self._opt.part_bytes or part.header_bytes >= MAX_HEADER_BYTES
        if full or self._opt.layout == "sample":
            self._seal_locked()

    def _gathers(self, segment: Segment) -> bool:  # an object without receipt must hold the whole sample
        return self._opt.layout == "sample" and not self._opt.attempt and segment.columns > 1

    # -- parts out -----------------------------------------------------------------------------------------------

    def _seal_locked(self) -> None:
        part, self._open = self._open, OpenPart()
        number = self._next_part
        self._next_part += 1
        self._stored_at = self._stored_at if self._storing else time.monotonic()
        self._storing += 1
        # Puts of one name run one after another, in one thread: a key that many requests name delays no other.
        name = None if self._opt.attempt else self._committer.name(part.segments[0], number)
        self._uploads.submit_for(name, self._store_part, part, number)

    def _seal_by_age(self) -> None:
        while not self._closed.wait(min(1.0, self._opt.part_seconds / 4)):
            # A separate method, so that its local variables are freed during the wait.
            self._seal_or_drop_old_segments()

    def _seal_or_drop_old_segments(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._storing or now - self._stored_at < self._opt.stale_seconds * _OUTAGE:
                self._served += now - self._looked_at
            self._looked_at = now
            if self._open.segments and now - self._open.since >= self._opt.part_seconds:
                self._seal_locked()
            for key, filling in list(self._filling.items()):
                if self._opt.attempt and self._served - filling.touched >= self._opt.stale_seconds:
                    # Its engine died, and another engine recomputed its row.
                    del self._filling[key]
                    self._held -= filling.drop()
                    self._lock.notify_all()

    def _store_part(self, part: OpenPart, number: int) -> None:
        try:
            self._commit(part, number)
        finally:
            # Free the memory before `_held` is decremented; otherwise waiting threads allocate more.
            part.segments.clear()
            self._blocks.trim()
            with self._lock:
                self._storing -= 1
                self._stored_at = time.monotonic()
                self._held -= part.held
                self._lock.notify_all()

    def _commit(self, part: OpenPart, number: int) -> None:
        buffers: list[Buffer] = []
        try:
            encoded = self._build(part)
            if encoded is None:
                return
            buffers = encoded.buffers
            event = self._committer.commit(part.segments, encoded, number, part.arrival)
            self._count(encoded)
            self._on_event(event)
        except Exception as e:  # noqa: BLE001 - after any error the segments must be reported as lost
            self._fail(part.segments, e)
        finally:
            # Some libraries' errors refer to themselves by their tracebacks, and so keep this frame until Python's
            # garbage collector runs. The usual NotFound of the check for a newer attempt is such an error.
            buffers.clear()

    def _build(self, part: OpenPart) -> EncodedPart | None:
        """Encode the part. Reports segments that no part can hold as lost. Returns None if no segment is left."""
        try:
            return build_part(part.segments, self._opt.codec, self._opt.about)
        except Exception:
            if len(part.segments) == 1 or self._opt.layout == "sample":
                raise  # a sample's columns are stored together or not at all
            good = []
            for segment in part.segments:
                try:
                    build_part([segment], self._opt.codec, self._opt.about)
                except Exception as e:  # noqa: BLE001 - any error of one segment
                    self._fail([segment], e)
                else:
                    good.append(segment)
            if len(good) == len(part.segments):
                raise
            part.segments[:] = good
            return build_part(good, self._opt.codec, self._opt.about) if good else None

    def _count(self, part: EncodedPart) -> None:
        self.meter.add("parts")
        self.meter.add("raw_bytes", part.raw_bytes)
        self.meter.add("stored_bytes", part.size)
        with self._lock:
            self._raw_bytes += part.raw_bytes
            self._stored_bytes += part.size

    def _oldest(self) -> float:
        """Age in seconds of the oldest segment that is in no sealed part."""
        # Without the lock: an engine's step may call this. ``list`` copies a dictionary's values atomically.
        part = self._open
        since = [f.began for f in list(self._filling.values()) if not f.lost] + ([part.since] if part.segments else [])
        return max(time.monotonic() - min(since), 0.0) if since else 0.0

    def _fail(self, segments: Sequence[EncodedSegment], error: Exception) -> None:
        # A time-out, or an error in this part, loses this part only. A store's refusal would also hit every later part.
        # Without a run no driver ends the attempt, and each sample fails alone.
        refused = isinstance(error, Fenced | StoreError) and not isinstance(error, Unavailable)
        fatal = refused and self._opt.attempt > 0
        self.meter.add("failed_parts", 1, type(error).__name__)
        if fatal:
            with self._lock:
                self._dead = error if isinstance(error, HsxError) else HsxError(f"the writer failed: {error!r}")
                self._lock.notify_all()
        log.error(
            "part of %d segments was not stored: %s", len(segments), error, exc_info=not isinstance(error, HsxError)
        )
        self._on_event(
            Lost(
                tuple(s.segment for s in segments),
                reason_not_stored(error, for_clients=self._opt.attempt == 0),
                fatal=fatal,
                fenced=isinstance(error, Fenced),
                conflict=isinstance(error, SampleConflict),
            )
        )

    def flush(self) -> None:
        """Seal the open part, and block until every sealed part is stored or failed and its event is reported."""
        with self._lock:
            if self._open.segments:
                self._seal_locked()
            while self._storing:
                self._lock.wait(1.0)

    def close(self) -> None:
        """Flush, then end the threads. Drops incomplete segments."""
        self.flush()
        self._closed.set()
        self._uploads.close()

    @property
    def held_bytes(self) -> int:
        """Raw bytes being encoded, encoded bytes not yet stored, and in a run the segments' other memory."""
        return self._held
