"""Outlet of a bare connector (vLLM's server, a plain ``LLM``): the worker's own writers store one object per sample."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.failure_markers import ENOUGH_FAILED, KEY_SHOWN, Markers, used_before
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.step import Expect, Skip
from hsx_dist.errors import NotFound
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.conditional_puts import require_conditional_puts
from hsx_dist.format.markers import OBJECT, is_of_a_key
from hsx_dist.format.receipt import Receipt
from hsx_dist.logger import get_logger
from hsx_dist.models.weights import folder_weights, hub_commit
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Segment, object_name
from hsx_dist.store import Store, open_store
from hsx_dist.tokenizers import tokenizer_hash
from hsx_dist.transport.affinity import any_core
from hsx_dist.transport.channel import Peer
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.transport.remote_sender import RemoteSender
from hsx_dist.transport.shipping import Copied
from hsx_dist.transport.writer_process import WriterProcessSpec, spawn
from hsx_dist.writers.base import Sender
from hsx_dist.writers.events import Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger(__name__)

#: Retries of a marker end after so many seconds. Without the marker, a reader waits until its own timeout.
MARKER_SECONDS = 10.0
#: Bytes of one sample's Python objects in one process, without metadata and arrays.
SAMPLE_BYTES = 8 << 10


@dataclass(slots=True)
class _Request:
    """A request that is neither stored nor failed."""

    name: str
    chosen: bool
    order: int  # in which the requests arrived
    request: str = ""  # its hash, where the client chose the name


@dataclass(slots=True)
class _Name:
    """Requests of one object that were scheduled and have not ended.

    ``failure``: key and reason of the request that ended last, if it failed. ``failed``: hashes of failed requests, as
    many as the markers need. ``stored``: the order of the latest stored request.
    """

    requests: set[str] = field(default_factory=set)
    stored: int = -1
    failure: tuple[str, str] | None = None
    failed: set[str] = field(default_factory=set)


class Writers(Sender, Protocol):
    """A sender that stores pages and reports whether each sample was stored."""

    #: uint8 memory that must hold the pages; None: any memory.
    memory: np.ndarray[Any, Any] | None

    def abandon(self) -> None:
        """Stop without storing the remaining samples."""
        ...


#: (sink options, callback for events, meter, bytes of the ring) → writers.
MakeWriters = Callable[[SinkOptions, Callable[[Event], None], Meter, int], Writers]


class StoreOutlet(Outlet):
    """An outlet that starts writers. If a sample fails, ``KEY.error.json`` ends a reader's wait.

    ``in_flight_bytes`` is divided. Half is for the ring, three tenths are for encoded bytes that are not stored yet. A
    twentieth in each process is for metadata, token ids and attached arrays. The rest is for the store's client.
    """

    def __init__(
        self,
        make_writers: MakeWriters,
        settings: ConnectorConfig,
        about: dict[str, Any],
        *,
        markers: Store,
        locks: ObjectLocks | None = None,
        meter: Meter | None = None,
    ):
        self._locks = locks
        self._markers = Markers(markers, settings.ttl_seconds, about, locks)
        self._requests: dict[str, _Request] = {}  # by request id
        self._order = count()
        self._names: dict[str, _Name] = {}
        self._submitted: dict[str, str] = {}  # request id → name, of samples that are neither stored nor failed
        self._claims: dict[str, int] = {}  # request id → bytes that count against the ring's limit until it ends
        self._settling = 0  # samples that are stored or failed, and whose markers are not queued yet
        self._state = threading.Lock()
        half = settings.in_flight_bytes // 2
        options = SinkOptions(
            codec=resolve_codec(settings.codec),
            about=about,
            writer="worker",
            layout="sample",
            max_bytes=settings.encoded_bytes,
            on_bad_rows=settings.on_bad_rows,
        )
        meter = Meter() if meter is None else meter
        self._writers = make_writers(options, self._on_event, meter, half)
        super().__init__(
            LocalEnd(
                self._writers,
                half,
                on_lost=self._lost,
                meter=meter,
                memory=self._writers.memory,
                sample_bytes=settings.sample_bytes,
            )
        )

    # -- called within steps: no store access, no lock that a writer holds. Lock files are on a local file system ----

    def expect(self, expected: Expect) -> None:
        name, request_id = expected.name, expected.request_id
        with self._state:
            self._requests[request_id] = _Request(name, expected.chosen, next(self._order), expected.request)
            group = self._names.setdefault(name, _Name())
            group.requests.add(request_id)
            if expected.chosen:
                group.failure, group.failed = None, set()  # of requests that ended before: see ``Markers.clear``
        if self._locks is not None:
            self._locks.ask(name, request_id)
        if expected.chosen:
            self._markers.clear(name)

    def admit(self, segment: Segment, /) -> bool:
        request_id = request_of(segment)
        if segment.column:
            # Column 0 claims the bytes of all columns. A request that lost a column has ended: do not claim again.
            return True
        with self._state:
            if request_id not in self._claims:
                nbytes = bytes_of_sample(segment)
                if not self.ring.claim(nbytes):
                    return False
                self._claims[request_id] = nbytes
            return True

    def submit(self, *pages: Copied) -> None:
        with self._state:
            for ref, _ in pages:
                if ref.start == 0 and ref.segment.column == 0:
                    name = ref.segment.name or object_name(ref.segment.key) + OBJECT
                    self._submitted[request_of(ref.segment)] = name
        super().submit(*pages)

    def skip(self, skip: Skip) -> None:
        super().skip(skip)
        if not skip.quiet:
            key = skip.key[:KEY_SHOWN]
            log.warning("hidden states of %s are not stored: %s", key, skip.reason, extra={"key": skip.key})
        reason = None if skip.quiet else skip.reason
        with self._state:
            expected = skip.request_id in self._requests
            if not expected:
                self._requests[skip.request_id] = _Request(skip.name, True, next(self._order), skip.request)
        if skip.conflict and not expected and self._locks is not None:
            # The request was never scheduled, so it has no lock yet. Without the lock its reader could get the other
            # sample before the marker is stored.
            self._locks.ask(skip.name, skip.request_id)
        self._end(skip.request_id, skip.key, skip.name, stored=False, reason=reason, conflict=skip.conflict)

    def prepared(self) -> None:
        if self._locks is not None:
            self._locks.wait()

    # -- called by the shipping thread -----------------------------------------------------------------------------

    def _lost(self, segment: Segment, why: str) -> None:
        self._settle(segment, why, conflict=False)

    # -- called by the sink ----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        assert not isinstance(event, Receipt)  # there is no run
        lost = event if isinstance(event, Lost) else None
        for segment in event.segments:
            if lost is not None and lost.conflict:
                self._settle(segment, used_before(segment.key), conflict=True)
            else:
                self._settle(segment, lost.reason if lost else None, conflict=False)

    def _settle(self, segment: Segment, reason: str | None, conflict: bool) -> None:
        request_id = request_of(segment)
        with self._state:
            name = self._submitted.pop(request_id, None)
            if name is None:
                return  # the request has ended already
            self._settling += 1
        stored = reason is None
        self.meter.add("stored" if stored else "failed")
        self._end(request_id, segment.key, name, stored=stored, reason=reason, conflict=conflict)
        with self._state:
            self._settling -= 1

    # -- the end of a request --------------------------------------------------------------------------------------

    def _end(self, request_id: str, key: str, name: str, *, stored: bool, reason: str | None, conflict: bool) -> None:
        """End a request, whose object is stored or not (``reason``). Its lock is released after its marker is stored.

        A failure marker waits while other requests of the same name are in flight. Their readers must not see it, and
        the object that they store may be another request's.
        """
        of_a_path = reason is not None and not is_of_a_key(name)  # may take a millisecond, so not under the lock
        with self._state:
            request = self._requests.pop(request_id, None)
            claimed = self._claims.pop(request_id, 0)
            group = self._names.get(name, _Name())
            group.requests.discard(request_id)
            if stored:
                group.failure = None
                group.stored = max(group.stored, request.order if request else -1)
            elif reason is not None and not conflict:
                # At a path, the marker of an earlier request would hide the later request's object.
                if not (of_a_path and request is not None and request.order < group.stored):
                    group.failure = (key, reason)
                if request is not None and request.request and len(group.failed) < ENOUGH_FAILED:
                    group.failed.add(request.request)
            last = not group.requests
            if last:
                self._names.pop(name, None)
            failure, failed = (group.failure, group.failed) if last else (None, set())

        looks = stored and (request is None or request.chosen)
        if not looks:
            # The request's data is freed, so its claim ends here, even if the store refuses the marker. Only its lock
            # stays held in that case.
            self.ring.unclaim(claimed)
        if conflict:
            self._markers.conflict(key, name, reason or "", holder=request_id)
        elif failure is not None:
            self._markers.fail(failure[0], name, failure[1], requests=failed, holder=request_id)
        elif looks:
            # Needed even if this process stored no marker: an earlier server may have left one. Samples that wait for
            # this check stay claimed, which bounds their number. New samples then wait in their cache blocks. No thread
            # waits.
            self._markers.stored(
                key, name, requests=failed, holder=request_id, after=partial(self.ring.unclaim, claimed)
            )
        elif self._locks is not None:
            self._locks.release(request_id, stored=stored)

    @property
    def pending(self) -> int:
        """Number of samples that are neither stored nor failed, plus changes of markers that are not stored."""
        return super().pending + len(self._submitted) + self._settling + self._markers.pending

    def close(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.pending and (end is None or time.monotonic() < end):
            time.sleep(0.01)
        if super().pending or self._submitted:
            self._writers.abandon()
            log.error(
                "hidden states of %d requests were not stored in time, %s; raise drain_seconds",
                len(self._submitted),
                _some(sorted(self._submitted.values())),
            )
        else:
            super().close()
            self._writers.close()
        if unsaid := self._markers.close():
            log.error(
                "markers of %d names were not stored in time, %s. Check the store, or raise drain_seconds",
                len(unsaid),
                _some(unsaid),
            )
        if self._locks is not None:
            self._locks.release_all()


class ThreadWriters(ThreadSender):
    """Writer threads of this process, and the sink into which they encode."""

    memory: np.ndarray[Any, Any] | None = None

    def close(self) -> None:
        super().close()
        self.sink.close()

    def abandon(self) -> None:
        pass  # threads that wait for a store cannot be stopped: they end with the process


def thread_writers(store: Store, threads: int) -> MakeWriters:
    """Return a factory of writers on ``threads`` threads of this process."""

    def make(options: SinkOptions, on_event: Callable[[Event], None], meter: Meter, _: int) -> Writers:
        return ThreadWriters(PartSink(store, options, on_event, meter), threads)

    return make


def process_writers(settings: ConnectorConfig) -> MakeWriters:
    """Return a factory of writers in a separate process.

    The process opens its own store. So it is not started while the mount of a folder is gone: its store would take the
    folder below the mount for the output.
    """
    watch = open_store(settings.output, settings.storage_options, retry_seconds=0) if settings.local else None

    def start(spec: WriterProcessSpec, ring: int) -> Peer:
        if watch is not None:
            with suppress(NotFound):
                watch.head("hsx-mount")  # any name: Unavailable if another folder is there
        return spawn(spec, ring)

    def make(options: SinkOptions, on_event: Callable[[Event], None], meter: Meter, ring_bytes: int) -> Writers:
        spec = WriterProcessSpec(
            url=settings.output,
            storage_options=settings.storage_options,
            options=options,
            threads=settings.writer_threads,
            ring_bytes=ring_bytes,
            drain_seconds=settings.drain_seconds,
            log_level=log.getEffectiveLevel(),
        )
        return RemoteSender(partial(start, spec), ring_bytes, on_event, meter, drain_seconds=spec.drain_seconds)

    return make


def bytes_of_sample(segment: Segment) -> int:
    """Return an upper estimate of a sample's bytes in one process until it is stored, without its states."""
    attached = sum(array.nbytes for array in segment.attached.values())
    # A str with non-ASCII characters takes up to four bytes for each character.
    columns = segment.columns * (SAMPLE_BYTES + 8 * segment.total)  # each column has the token ids
    return columns + sys.getsizeof(segment.metadata) + 2 * len(str(segment.meta)) + attached


def request_of(segment: Segment) -> str:
    """Return the engine's request id from a segment's source."""
    return segment.source.rpartition(":")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + ("…" if len(names) > 5 else "")


def _tokenizer_sha256(model: Any) -> str | None:
    """Return the hash of the tokenizer in vLLM's ``ModelConfig``; None if there is none or it cannot be loaded."""
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    try:
        return tokenizer_hash(
            AutoTokenizer.from_pretrained(
                model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
            )
        )
    except Exception as e:  # noqa: BLE001 - the hash is a label only: its absence must not end the engine
        log.warning(
            "tokenizer cannot be loaded; objects are stored without tokenizer_sha256: %s: %s", type(e).__name__, e
        )
        return None


def _revision(model: Any, load_format: str) -> dict[str, Any]:
    """Return what identifies the weights of vLLM's ``ModelConfig``: the hash of a folder, or the hub's commit."""
    if (weights := folder_weights(model.model, load_format)) is not None:
        return {"revision": model.revision, "weights": weights}
    return {"revision": hub_commit(model.model, model.revision) or model.revision}


def store_outlet(settings: ConnectorConfig, vllm_config: VllmConfig) -> StoreOutlet:
    """Build the outlet of a bare connector.

    Raises:
        StoreError: the store at ``output`` cannot be opened, written or read.
        ConfigError: the store replaces existing objects, so that a used key would lose its sample.
    """
    import vllm

    from hsx_dist import __version__

    model = vllm_config.model_config
    about = {
        "model": model.model,
        **_revision(model, str(vllm_config.load_config.load_format)),
        "tokenizer_sha256": _tokenizer_sha256(model),
        "num_hidden_layers": getattr(model.hf_text_config, "num_hidden_layers", None),
        "norm": "pre",
        "vllm": vllm.__version__,
        "hsx": __version__,
    }
    meter = Meter()
    with any_core():  # otherwise encoding and storing run on the engine's core
        # Opened in this process too, so that the engine's start fails on a wrong URL or missing access.
        store = open_store(settings.output, settings.storage_options, on_retry=meter.retried)
        require_conditional_puts(store)
        # A memory:// store exists in one process only.
        apart = settings.transport == "spawn" and not settings.output.startswith("memory:")
        return StoreOutlet(
            process_writers(settings) if apart else thread_writers(store, settings.writer_threads),
            settings,
            about,
            markers=open_store(settings.output, settings.storage_options, retry_seconds=MARKER_SECONDS),
            locks=ObjectLocks(store.url) if settings.local and settings.use_synchronization_lock else None,
            meter=meter,
        )
