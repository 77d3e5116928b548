"""A connector by itself (vLLM's server, somebody's own ``LLM``): writer threads in the worker, one sample an object."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from hsx_dist.connector.outlet import LocalOutlet
from hsx_dist.connector.settings import ConnectorSettings
from hsx_dist.errors import HsxError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.page import object_name
from hsx_dist.store import Store, open_store
from hsx_dist.writers.sink import Event, Lost, PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class StoreOutlet(LocalOutlet):
    """A local outlet with writer threads of its own; a failure leaves ``KEY.error.json`` for whoever waits."""

    def __init__(self, store: Store, settings: ConnectorSettings, about: dict[str, Any]):
        self._store = store
        options = SinkOptions(
            codec=resolve_codec(settings.codec),
            about=about,
            writer="worker",
            layout="sample",
            max_bytes=4 * settings.in_flight_bytes,
        )
        self._sink = PartSink(store, options, self._on_event)
        super().__init__(ThreadSender(self._sink, settings.writer_threads), settings.in_flight_bytes)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Lost):
            for segment in event.segments:
                self._mark(segment.key, event.reason)

    def skip(self, key: str, reason: str) -> None:
        log.warning("hidden states of %s are not stored: %s", key, reason)
        super().skip(key, reason)

    def _mark(self, key: str, reason: str) -> None:
        try:
            body = json.dumps({"key": key, "error": reason}).encode()
            self._store.put(f"{object_name(key)}.error.json", [body])
        except HsxError as e:
            log.error("no failure marker could be stored for %s: %s", key, e)

    def close(self) -> None:
        super().close()
        self._sink.close()


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
        "norm": "pre",
        "vllm": vllm.__version__,
        "hsx": __version__,
    }
    return StoreOutlet(open_store(settings.output), settings, about)
