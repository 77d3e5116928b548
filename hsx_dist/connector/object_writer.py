"""A connector by itself (vLLM's server, somebody's own ``LLM``): writers of the worker's own, one sample an object."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.failure_markers import ENOUGH_FAILED, Markers
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.step import Expect, Skip
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.markers import OBJECT
from hsx_dist.format.receipt import Receipt
from hsx_dist.logger import get_logger
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Segment, object_name
from hsx_dist.store import Store, open_store
from hsx_dist.tokenizers import tokenizer_hash
from hsx_dist.transport.affinity import any_core
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

#: A marker is worth this many seconds of trying: it only spares a reader its own time limit.
MARKER_SECONDS = 10.0
#: Python objects of one sample in one process, without metadata and arrays.
SAMPLE_BYTES = 8 << 10


@dataclass(slots=True)
class _Request:
    """One whose fate is open."""

    name: str
    chosen: bool
    request: str = ""  # its hash, where the client chose the name


@dataclass(slots=True)
class _Name:
    """Requests of one object that were scheduled and have not ended.

    ``failure``: key and reason of the latest to end, if it failed. ``failed``: hashes of those that failed, as many as
    the markers need.
    """

    requests: set[str] = field(default_factory=set)
    failure: tuple[str, str] | None = None
    failed: set[str] = field(default_factory=set)


class Writers(Sender, Protocol):
    """A sender that stores, and tells what became of what it was sent."""

    #: Where pages must lie, uint8; None: anywhere.
    memory: np.ndarray[Any, Any] | None

    def abandon(self) -> None:
        """End without storing what is left."""
        ...


#: (how parts are made, who is told, who counts, bytes of the ring) → writers.
MakeWriters = Callable[[SinkOptions, Callable[[Event], None], Meter, int], Writers]


class StoreOutlet(Outlet):
    """An outlet with writers of its own. If a sample fails, ``KEY.error.json`` ends a reader's wait.

    ``in_flight_bytes`` is divided: half for the ring, three tenths for encoded bytes that are not stored yet, a
    twentieth in each process for what samples occupy besides their states, and the rest for the store's client.
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
        self._names: dict[str, _Name] = {}
        self._submitted: dict[str, str] = {}  # request id → name, of what is neither stored nor failed
        self._claims: dict[str, int] = {}  # request id → bytes that count against the ring's limit until its end
        self._settling = 0  # stored or failed, and on its way to whoever tells
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

    # -- called by steps: no store, no lock that a writer holds; locks' files are a local file system's ------------

    def expect(self, expected: Expect) -> None:
        name, request_id = expected.name, expected.request_id
        with self._state:
            self._requests[request_id] = _Request(name, expected.chosen, expected.request)
            self._names.setdefault(name, _Name()).requests.add(request_id)
        if self._locks is not None:
            self._locks.ask(name, request_id)
        if expected.chosen and self._markers.failed(name):
            self._markers.clear(name)  # an earlier request's: it is not about this one

    def admit(self, segment: Segment, /) -> bool:
        request_id = request_of(segment)
        if segment.column:
            return True  # claimed with column 0. The request may have ended since: a lost column costs it all others
        with self._state:
            if request_id not in self._claims:
                nbytes = bytes_besides(segment)
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
        if skip.conflict and self._locks is not None:
            # It was never scheduled: whoever has its answer must not find the other sample before the marker is there.
            self._locks.ask(skip.name, skip.request_id)
        if not skip.quiet:
            log.warning("hidden states of %s are not stored: %s", skip.key, skip.reason, extra={"key": skip.key})
        reason = None if skip.quiet else skip.reason
        with self._state:
            self._requests.setdefault(skip.request_id, _Request(skip.name, chosen=True, request=skip.request))
        self._end(skip.request_id, skip.key, skip.name, stored=False, reason=reason, conflict=skip.conflict)

    def prepared(self) -> None:
        if self._locks is not None:
            self._locks.wait()

    # -- told by the shipping thread ------------------------------------------------------------------------------

    def _lost(self, segment: Segment, why: str) -> None:
        self._settle(segment, why, conflict=False)

    # -- told by the sink -----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        assert not isinstance(event, Receipt)  # there is no run
        reason, conflict = (event.reason, event.conflict) if isinstance(event, Lost) else (None, False)
        for segment in event.segments:
            self._settle(segment, reason, conflict)

    def _settle(self, segment: Segment, reason: str | None, conflict: bool) -> None:
        request_id = request_of(segment)
        with self._state:
            name = self._submitted.pop(request_id, None)
            if name is None:
                return  # told already
            self._settling += 1
        stored = reason is None
        self.meter.add("stored" if stored else "failed")
        self._end(request_id, segment.key, name, stored=stored, reason=reason, conflict=conflict)
        with self._state:
            self._settling -= 1

    # -- the end of a request --------------------------------------------------------------------------------------

    def _end(self, request_id: str, key: str, name: str, *, stored: bool, reason: str | None, conflict: bool) -> None:
        """What became of a request: its object is there, or (``reason``) it is not. Its lock opens once that is told.

        While others of the same name are under way a failure waits for them: their readers are not to meet its marker,
        and what they store may be another request's.
        """
        with self._state:
            request = self._requests.pop(request_id, None)
            claimed = self._claims.pop(request_id, 0)
            group = self._names.get(name, _Name())
            group.requests.discard(request_id)
            if stored:
                group.failure = None
            elif reason is not None and not conflict:
                group.failure = (key, reason)
                if request is not None and request.request and len(group.failed) < ENOUGH_FAILED:
                    group.failed.add(request.request)
            last = not group.requests
            if last:
                self._names.pop(name, None)
            failure, failed = (group.failure, group.failed) if last else (None, set())

        looks = stored and (request is None or request.chosen)
        if not looks:
            # Its data is gone. A marker that the store refuses keeps the lock, and no memory that others need.
            self.ring.unclaim(claimed)
        if conflict:
            self._markers.conflict(key, name, reason or "", holder=request_id)
        elif failure is not None:
            self._markers.fail(failure[0], name, failure[1], requests=failed, holder=request_id)
        elif looks:
            # Also where this process knows of no marker: an earlier server may have left one. Samples that wait for
            # that stay claimed, so that they do not pile up: new ones wait with their blocks, and no thread waits.
            self._markers.stored(
                key, name, requests=failed, holder=request_id, after=partial(self.ring.unclaim, claimed)
            )
        elif self._locks is not None:
            self._locks.release(request_id, stored=stored)

    @property
    def pending(self) -> int:
        """Samples that are neither stored nor failed, what is still to be shipped, and what is still to be told."""
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
        if untold := self._markers.close():
            log.error("what became of %d requests could not be told in time, %s", len(untold), _some(untold))
        if self._locks is not None:
            self._locks.release_all()


class ThreadWriters(ThreadSender):
    """Threads of this process, and the sink into which they encode."""

    memory: np.ndarray[Any, Any] | None = None

    def close(self) -> None:
        super().close()
        self.sink.close()

    def abandon(self) -> None:
        pass  # threads that wait for a store cannot be ended: they die with the process


def thread_writers(store: Store, threads: int) -> MakeWriters:
    """Writers on so many threads of this process."""

    def make(options: SinkOptions, on_event: Callable[[Event], None], meter: Meter, _: int) -> Writers:
        return ThreadWriters(PartSink(store, options, on_event, meter), threads)

    return make


def process_writers(settings: ConnectorConfig) -> MakeWriters:
    """Writers in a process of their own."""

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
        return RemoteSender(partial(spawn, spec), ring_bytes, on_event, meter, drain_seconds=spec.drain_seconds)

    return make


def bytes_besides(segment: Segment) -> int:
    """Upper estimate of the bytes that a sample occupies in one process besides its states, until it is stored."""
    attached = sum(array.nbytes for array in segment.attached.values())
    # A str of other than ASCII characters takes up to four bytes for each.
    columns = segment.columns * (SAMPLE_BYTES + 8 * segment.total)  # each has the token ids
    return columns + sys.getsizeof(segment.metadata) + 2 * len(str(segment.meta)) + attached


def request_of(segment: Segment) -> str:
    """The id of the engine's request that a segment was copied for."""
    return segment.source.rpartition(":")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + ("…" if len(names) > 5 else "")


def _tokenizer_sha256(model: Any) -> str | None:
    """Of vLLM's ``ModelConfig``; None where the engine has no tokenizer, or it cannot be loaded here."""
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    try:
        return tokenizer_hash(
            AutoTokenizer.from_pretrained(
                model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
            )
        )
    except Exception as e:  # noqa: BLE001 - an engine must not die of what only describes its samples
        log.warning("objects will not say which tokenizer made their token ids: %s: %s", type(e).__name__, e)
        return None


def store_outlet(settings: ConnectorConfig, vllm_config: VllmConfig) -> StoreOutlet:
    """The outlet of a bare connector.

    Raises:
        StoreError: the store at ``output`` cannot be opened.
    """
    import vllm

    from hsx_dist import __version__

    model = vllm_config.model_config
    about = {
        "model": model.model,
        "revision": model.revision,
        "tokenizer_sha256": _tokenizer_sha256(model),
        "num_hidden_layers": getattr(model.hf_text_config, "num_hidden_layers", None),
        "norm": "pre",
        "vllm": vllm.__version__,
        "hsx": __version__,
    }
    meter = Meter()
    with any_core():  # encoding and storing are not to take the engine's time
        # Opened here too: what is wrong with it is the engine's to say.
        store = open_store(settings.output, settings.storage_options, on_retry=meter.retried)
        # An object at memory:// exists in one process.
        apart = settings.transport == "spawn" and not settings.output.startswith("memory:")
        return StoreOutlet(
            process_writers(settings) if apart else thread_writers(store, settings.writer_threads),
            settings,
            about,
            markers=open_store(settings.output, settings.storage_options, retry_seconds=MARKER_SECONDS),
            locks=ObjectLocks(store.url) if settings.local and settings.use_synchronization_lock else None,
            meter=meter,
        )
