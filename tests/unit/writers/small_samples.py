"""Small samples for the sink's tests. Their values are a function of their position."""

from __future__ import annotations

import numpy as np

from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Manifest
from hsx_dist.page import Page, Segment
from hsx_dist.store import Store
from hsx_dist.writers.sink import SinkOptions

LAYERS, HIDDEN, CHUNK = (2, 5), 8, 16


def pages(key: str, n: int, *, segment_tokens: int = 64, seed: int = 0) -> list[Page]:
    """Pages of a sample in the worker half's form. Each element's value is a function of its position."""
    found = []
    for index, start in enumerate(range(0, n, segment_tokens)):
        segment = Segment(key, index, start, min(start + segment_tokens, n), n)
        for at in range(segment.start, segment.stop, CHUNK):
            stop = min(at + CHUNK, segment.stop)
            rows = np.arange(at, at + CHUNK)[None, :, None]
            layers = np.arange(len(LAYERS))[:, None, None]
            data = (rows * 7 + layers * 1000 + np.arange(HIDDEN) + seed).astype(np.uint16)
            ids = np.arange(at, stop, dtype=np.int64) + seed
            found.append(Page(segment, at, stop, CHUNK, LAYERS, "bfloat16", data.shape, "LTH", ids, data))
    return found


def options(attempt: int = 1, **changes) -> SinkOptions:
    return SinkOptions(
        **{"codec": resolve_codec("split"), "about": {"model": "m"}, "writer": "w", "attempt": attempt, **changes}
    )


def check_readable(store: Store, manifest: Manifest, key: str, n: int) -> None:
    record = manifest.samples[key]
    assert record.num_tokens == n
    states = []
    for proof in record.segments:
        part = Part.open(store, proof.part, header_bytes=manifest.parts[proof.part].header_bytes)
        states.append(part.read(proof.slot))
    expected = np.concatenate([p.data[:, : p.num_tokens] for p in pages(key, n)], axis=1).transpose(1, 0, 2)
    np.testing.assert_array_equal(np.concatenate(states), expected)
