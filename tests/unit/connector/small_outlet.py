"""Outlets of a bare connector, and samples for them."""

from __future__ import annotations

import numpy as np

from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.connector.object_writer import StoreOutlet, process_writers, thread_writers
from hsx_dist.connector.step import Expect
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store

HIDDEN, LAYERS = 8, (1, 2)


def outlet_on(tmp_path, *, store=None, markers=None, locks=True, apart=False, about=None, **settings) -> StoreOutlet:
    """``apart``: writers in a separate process, instead of threads that store into ``store``."""
    extra = {"hsx": {"output": str(tmp_path), "in_flight_bytes": 1 << 20, "segment_bytes": 1 << 18, **settings}}
    given = read_connector_config(extra)
    return StoreOutlet(
        process_writers(given) if apart else thread_writers(store or open_store(str(tmp_path)), given.writer_threads),
        given,
        {"model": "m", "revision": None, "norm": "pre", **(about or {})},
        markers=markers or open_store(str(tmp_path)),
        locks=ObjectLocks(tmp_path) if locks else None,
    )


def submit(
    outlet: StoreOutlet,
    key: str,
    states: np.ndarray,
    ids=None,
    *,
    name="",
    chosen=True,
    meta=None,
    request="",
    ready=None,
    **column,
) -> None:
    """Submit ``states``, float32 ``[L, T, H]``, as one page. ``column``: fields of its ``Segment``."""
    n = states.shape[1]
    if not column.get("column"):
        outlet.expect(Expect(request or key, name or f"{key}.safetensors", 0, chosen))
        outlet.prepared()  # as the worker half does before its step ends
    offset = outlet.ring.allocate(states.nbytes)
    assert offset is not None
    outlet.memory[offset : offset + states.nbytes] = states.reshape(-1).view(np.uint8)
    segment = Segment(key, 0, 0, n, n, name=name, meta=meta or {}, source=f"{request or key}:0", **column)
    assert not column or outlet.admit(segment)
    ids = np.arange(n, dtype=np.int64) if ids is None else np.asarray(ids, np.int64)
    outlet.submit((Page(segment, 0, n, n, LAYERS, "float32", states.shape, "LTH", ids, offset=offset), ready))


def some(n=5, seed=0):
    return np.random.default_rng(seed).standard_normal((len(LAYERS), n, HIDDEN)).astype(np.float32)
