"""A small run in a folder, written by the real sink, with heartbeats, refused and failed rows, and hostile texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import Receipt, RowFate
from hsx_dist.format.names import receipt_name
from hsx_dist.format.runs import beat, load_manifest, take_attempt, write_complete
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.observe.progress import Progress
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.writers.sink import PartSink, SinkOptions
from tests.harness.runs import write_v1_run

HOSTILE = "</title><script>alert('x')</script><img src=http://127.0.0.1:9/x>"


@pytest.fixture
def small_run(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "run"))
    meaning = {"model": HOSTILE, "layers": [2, 15, 30]}
    write_v1_run(store, {"meaning": meaning, "settings": {"codec": "split"}, "created": "2026-01-01T00:00:00+00:00"})
    attempt = take_attempt(store, {"host": "here"})
    meter = Meter()
    progress = Progress(12, meter=meter)
    progress.started()
    received: list[Receipt] = []
    options = SinkOptions(resolve_codec("split"), {"model": "m"}, "w", attempt, part_bytes=8192)
    sink = PartSink(store, options, lambda e: received.append(e) if isinstance(e, Receipt) else None, meter)
    for i in range(9):
        key = HOSTILE if i == 4 else f"row-{i}"
        for page in random_sample(key, 5 + 9 * i, seed=i, odd=i == 7).pages():
            sink.add(page)
        progress.computed(5 + 9 * i)
    sink.close()
    for receipt in received:
        progress.stored(rows=len(receipt.segments), raw_bytes=receipt.raw_bytes, stored_bytes=receipt.size)
    fates = (
        RowFate("bad-1", 9, "refused", "expected a text, got nothing in row 9", 0),
        RowFate("bad-2", 10, "refused", "expected a text, got nothing in row 10", 0),
        RowFate("bad-3", 11, "failed", f"its engine died: {HOSTILE}", 3),
    )
    for fate in fates:
        progress.ended(fate.fate)
    rows = Receipt(attempt, "driver", 1, None, 0, "00000000", 0, 0, (), fates, "2026-01-01T00:00:01+00:00")
    store.put_if_absent(receipt_name(attempt, "driver", 1), rows.to_json())
    meter.add("engine_seconds", 10.0)
    meter.add("store_wait_seconds", 2.5)
    meter.add("copy_seconds", 0.5)
    meter.add("idle_seconds", 1.0)
    progress.counted(Increments(meter).counters())
    beat(store, attempt, 1, "finished", progress.snapshot())
    write_complete(store, attempt, load_manifest(store), {"rows": 12})
    return store
