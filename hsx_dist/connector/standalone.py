"""A connector by itself (vLLM's server, somebody's own ``LLM``): writer threads in the worker, one sample an object."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hsx_dist.connector.locks import CompanionLocks
from hsx_dist.connector.outlet import LocalOutlet, PageRef
from hsx_dist.connector.settings import ConnectorSettings
from hsx_dist.errors import HsxError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import object_name
from hsx_dist.store import Store, open_store
from hsx_dist.tokenizers import tokenizer_hash
from hsx_dist.writers.sink import Event, Lost, PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

    from hsx_dist.connector.metadata import Expect, Skip

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
#: A marker is worth this many seconds of trying: it only spares a reader its own time limit.
MARKER_SECONDS = 10.0


def marker_name(name: str) -> str:
    """The failure marker beside the object ``name``."""
    return f"{name.removesuffix(SUFFIX)}.error.json"


class StoreOutlet(LocalOutlet):
    """A local outlet with writer threads of its own. A failure leaves ``KEY.error.json`` for whoever waits.

    The host memory of ``in_flight_bytes`` is shared: half for the ring, half for what is encoded and not yet stored.
    """

    def __init__(
        self,
        store: Store,
        settings: ConnectorSettings,
        about: dict[str, Any],
        *,
        markers: Store | None = None,
        locks: CompanionLocks | None = None,
        meter: Meter | None = None,
    ):
        self._store = store
        self._markers = markers or store
        self._locks = locks
        self._ttl = settings.ttl_seconds
        self._marking = ThreadPoolExecutor(1, thread_name_prefix="hsx-mark")
        self._open: dict[str, int] = {}  # key → how many samples of it are submitted and neither stored nor failed
        self._state = threading.Lock()
        half = settings.in_flight_bytes // 2
        options = SinkOptions(
            codec=resolve_codec(settings.codec),
            about=about,
            writer="worker",
            layout="sample",
            max_bytes=half,
            on_bad_rows=settings.on_bad_rows,
        )
        meter = Meter() if meter is None else meter
        self._sink = PartSink(store, options, self._on_event, meter)
        self._threads = ThreadSender(self._sink, settings.writer_threads)
        super().__init__(self._threads, half, meter=meter)

    # -- called by steps: no store, no lock that a writer holds for long ------------------------------------------

    def expect(self, expected: Expect) -> None:
        if self._locks is not None:
            try:
                self._locks.hold(expected.name)
            except OSError as e:
                log.warning("no lock file for %s: %s", expected.name, e)
        if expected.chosen:
            # An earlier request of this key may have left a marker: it is not about this one.
            self._marking.submit(self._unmark, expected.name)

    def submit(self, ref: PageRef, ready: Callable[[], None] | None) -> None:
        if ref.start == 0:
            with self._state:
                self._open[ref.segment.key] = self._open.get(ref.segment.key, 0) + 1
        super().submit(ref, ready)

    def skip(self, skip: Skip) -> None:
        super().skip(skip)
        if self._locks is not None:
            self._locks.release(skip.name, stored=False)
        if not skip.quiet:
            log.warning("hidden states of %s are not stored: %s", skip.key, skip.reason, extra={"key": skip.key})
            self._marking.submit(self._mark, skip.key, skip.name, skip.reason)

    # -- told by the sink -----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Lost):
            for segment in event.segments:
                name = segment.name or object_name(segment.key) + SUFFIX
                self._marking.submit(self._mark, segment.key, name, event.reason)
                self._settle(segment.key, name, stored=False)
        else:
            for proof in event.segments:
                self._settle(proof.segment.key, event.part or "", stored=True)

    def _settle(self, key: str, name: str, *, stored: bool) -> None:
        self.meter.add("stored" if stored else "failed")
        with self._state:
            left = self._open.get(key, 0) - 1
            if left > 0:
                self._open[key] = left
            else:
                self._open.pop(key, None)
        if self._locks is not None:
            self._locks.release(name, stored=stored)

    def _mark(self, key: str, name: str, reason: str) -> None:
        try:
            body: dict[str, Any] = {"key": key, "error": reason}
            if self._ttl is not None:
                body["expires"] = round(time.time() + self._ttl)
            self._markers.put(marker_name(name), [json.dumps(body).encode()])
        except HsxError as e:
            log.error("no failure marker could be stored for %s: %s", key, e)

    def _unmark(self, name: str) -> None:
        try:
            self._markers.delete(marker_name(name))
        except HsxError as e:
            log.warning("an old failure marker of %s may still be there: %s", name, e)

    @property
    def pending(self) -> int:
        """Samples that are neither stored nor failed, and what is still to be shipped."""
        return super().pending + len(self._open)

    def close(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.pending and (end is None or time.monotonic() < end):
            time.sleep(0.01)
        if self.pending:
            # Threads that wait for the store cannot be ended; they die with the process.
            left = sorted(self._open)
            log.error(
                "hidden states of %d requests were not stored in time, %s%s; raise drain_seconds",
                len(left),
                ", ".join(left[:5]),
                "…" if len(left) > 5 else "",
            )
        else:
            super().close()
            self._threads.close()
            self._sink.close()
        self._marking.shutdown(wait=not self.pending, cancel_futures=bool(self.pending))
        if self._locks is not None:
            self._locks.release_all()


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


def store_outlet(settings: ConnectorSettings, vllm_config: VllmConfig) -> StoreOutlet:
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
    local = "://" not in settings.output or settings.output.startswith(("file://", "local://"))
    folder = settings.output.partition("://")[2] or settings.output
    meter = Meter()
    return StoreOutlet(
        open_store(settings.output, settings.storage_options, on_retry=meter.retried),
        settings,
        about,
        markers=open_store(settings.output, settings.storage_options, retry_seconds=MARKER_SECONDS),
        locks=CompanionLocks(folder) if local and settings.use_synchronization_lock else None,
        meter=meter,
    )
