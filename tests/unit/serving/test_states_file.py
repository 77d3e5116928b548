"""The time and the limits of ``StatesFile``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hsx_dist.errors import FormatError
from hsx_dist.format.checksum import crc32c
from hsx_dist.format.codecs import ZstdCodec
from hsx_dist.format.codecs.base import EXPANSION_VARIABLE
from hsx_dist.format.container import Part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.segment_info import SegmentInfo
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import Segment
from hsx_dist.reading.sample import Sample, load_bytes
from hsx_dist.serving import states_file
from hsx_dist.serving.states_file import Range, StatesFile
from hsx_dist.testing.stores import MemoryStore
from tests.unit.growth import check_linear


def claimed(tokens: int, *, hidden_size: int, stored: int, segments: int = 1, first: int = 0) -> Sample:
    """A sample with one chunk for each token, of ``stored`` bytes, in equal segments. The chunks do not decode.

    The first chunk of a segment has ``first`` more bytes."""
    n = tokens // segments
    ids = np.zeros(n, np.int64).tobytes()
    info = SegmentInfo(
        *(Segment("a", 0, 0, n, tokens), (3,), "float32", hidden_size, 1, 1),
        *(((stored + first, *(stored,) * (n - 1)),), ((0,) * n,), crc32c(ids)),
    )
    cut = [replace(info, segment=Segment("a", a, a, a + n, tokens)) for a in range(0, tokens, n)]
    store = MemoryStore()
    store.put(
        "p",
        [
            build_header(Description(ZstdCodec(), {}, "segments", tuple(cut))),
            ids * segments,
            bytes(tokens * stored + segments * first),
        ],
    )
    part = Part.open(store, "p")
    proofs = [SegmentProof(one.segment, i, "", 0, 0, part="p") for i, one in enumerate(part.segments)]
    return Sample("a", proofs, lambda _: part, store.url)


def test_a_small_object_that_claims_many_pieces_is_refused_before_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece alone is within the limit."""
    sample = claimed(100, hidden_size=1 << 20, stored=1)
    monkeypatch.setattr(states_file, "load_bytes", None)
    for wanted in (Range(), Range(tokens=(0, 1)), Range(points=("hidden_states",))):
        with pytest.raises(FormatError, match=f"at most 64 times .*{EXPANSION_VARIABLE}"):
            StatesFile(sample, wanted)


def test_a_large_first_chunk_does_not_make_the_pieces_small() -> None:
    """Each piece loads all token ids of a segment."""
    sample = claimed(1000, hidden_size=1, stored=1, first=states_file.PIECE_BYTES)
    for wanted in (Range(), Range(tokens=(0, 500)), Range(points=("hidden_states",))):
        assert len(StatesFile(sample, wanted)) <= 3


def test_a_piece_is_not_smaller_than_the_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    assert len(StatesFile(claimed(1000, hidden_size=1, stored=1), Range())) < 10


def test_the_time_of_a_file_is_in_proportion_to_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    monkeypatch.setattr(states_file, "_ID_BYTES", 0)

    def make(tokens: int) -> Callable[[], object]:
        sample = claimed(tokens, hidden_size=1, stored=1)
        return lambda: StatesFile(sample, Range())

    check_linear(make, 3000)


def test_finding_the_tokens_of_a_piece_takes_the_same_time_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    monkeypatch.setattr(states_file, "_ID_BYTES", 0)
    monkeypatch.setattr(Sample, "load_carrier", lambda *_: (np.zeros((1, 1, 1), np.uint32), np.zeros(1, np.int64)))

    def make(tokens: int) -> Callable[[], object]:
        file = StatesFile(claimed(tokens, hidden_size=1, stored=1), Range())
        assert len(file) == tokens + 1
        return lambda: [file.piece(i) for i in range(len(file))]

    check_linear(make, 1000)


def test_finding_the_segments_of_a_piece_takes_the_same_time_for_each() -> None:
    def make(tokens: int) -> Callable[[], object]:
        sample = claimed(tokens, hidden_size=1, stored=1, segments=tokens)
        return lambda: [load_bytes(sample, None, (i, i + 1)) for i in range(tokens)]

    check_linear(make, 1000)
