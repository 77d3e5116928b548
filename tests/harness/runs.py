"""Runs made without an engine: real encoder, real receipts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hsx_dist.format.codecs import Codec, SplitCodec
from hsx_dist.format.container import SegmentEncoder, build_part
from hsx_dist.format.manifest import Receipt, RowFate, SegmentProof
from hsx_dist.format.names import part_name, receipt_name
from hsx_dist.format.place import RUN, open_place, start_run
from hsx_dist.format.runs import load_manifest, take_attempt, write_complete
from hsx_dist.page import Segment, token_hash
from hsx_dist.store import Store
from hsx_dist.testing.samples import RandomSample

#: A sample, one of its segments, and the input row.
Stored = tuple[RandomSample, Segment, int | None]


def whole(sample: RandomSample, row: int | None = None) -> Stored:
    """All of a sample in one segment."""
    return sample, sample.segments()[0], row


class RunWriter:
    """Takes the next attempt of the run at ``root``, and stores parts with their receipts, like a sink.

    Args:
        attempt: write in this attempt instead.
        attached: arrays for every sample, or a function that returns them for a sample.
    """

    def __init__(
        self,
        root: Store,
        codec: Codec | None = None,
        name: str = "w",
        attached: Any = None,
        about: Mapping[str, Any] | None = None,
        attempt: int | None = None,
    ):
        self.place = open_place(root)
        self.store = store = self.place.store
        self.codec, self.name, self.attached = codec or SplitCodec(), name, attached
        self.about = dict(about or {"model": "tiny"})
        self.attempt = attempt or take_attempt(store, {})
        self.seq = 0

    def put(self, segments: Sequence[Stored], rows: Sequence[RowFate] = ()) -> Receipt:
        """Store one part of these segments, and its receipt. Without segments: only a receipt of ``rows``."""
        self.seq += 1
        encoded, proofs = [], []
        for slot, (sample, segment, row) in enumerate(segments):
            encoder = SegmentEncoder(self.codec)
            for page in sample.pages(segment):
                encoder.add(page)
            e = encoder.finish(self._attached(sample) if segment.index == segment.column == 0 else None)
            encoded.append(e)
            facts = token_hash(e.token_ids), e.raw_nbytes, e.nbytes, row, segment.sample_hash, "", segment.content
            proofs.append(SegmentProof(segment, slot, *facts))
        name: str | None = None
        size, crc, header_bytes, raw_bytes = 0, "00000000", 0, 0
        if encoded:
            part = build_part(encoded, self.codec, self.about)
            name = part_name(self.attempt, self.name, self.seq)
            self.store.put(name, part.buffers)
            size, crc, header_bytes, raw_bytes = part.size, part.crc32c, part.header_bytes, part.raw_bytes
        receipt = Receipt(
            *(self.attempt, self.name, self.seq, name, size, crc, header_bytes, raw_bytes),
            *(tuple(proofs), tuple(rows), "2026-01-01T00:00:00+00:00"),
        )
        self.store.put_if_absent(receipt_name(self.attempt, self.name, self.seq), receipt.to_json())
        return receipt

    def complete(self) -> None:
        """Mark the run as complete."""
        write_complete(self.store, self.attempt, load_manifest(self.store), {})

    def _attached(self, sample: RandomSample) -> Mapping[str, np.ndarray[Any, Any]] | None:
        found: Mapping[str, np.ndarray[Any, Any]] | None = (
            self.attached(sample) if callable(self.attached) else self.attached
        )
        return found


def store_run(
    store: Store,
    samples: Iterable[RandomSample],
    *,
    per_part: int = 4,
    codec: Codec | None = None,
    attached: Any = None,
    info: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    version: int = 2,
) -> RunWriter:
    """Store a complete run of whole samples, ``per_part`` of them in a part. Row *i* is the *i*-th sample."""
    found = list(samples)
    layers = list(found[0].layer_ids) if found else []
    make = start_run if version == 2 else write_v1_run
    make(store, {"meaning": {"model": "tiny", "layers": layers}, "settings": {}, **(info or {})})
    writer = RunWriter(store, codec, attached=attached, about=about)
    for start in range(0, len(found), per_part):
        writer.put([whole(s, start + i) for i, s in enumerate(found[start : start + per_part])])
    writer.complete()
    return writer


def unsealed(data: bytes) -> dict[str, Any]:
    """A run's JSON object without its checksum, for tests that change it and store it again."""
    found: dict[str, Any] = json.loads(data)
    found.pop("crc32c", None)
    return found


def write_v1_run(store: Store, info: Mapping[str, Any]) -> None:
    """Store the description of a run of version 1 in ``store``, next to the run's objects."""
    store.put(RUN, [json.dumps({"format": "hsx-run/1", **info}).encode()])
