"""Token ids and attached arrays are read whole: few of them at once, and none twice."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hsx_dist.errors import FormatError
from hsx_dist.format.checksum import crc32c
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.codecs.base import EXPANSION_VARIABLE, check_whole
from hsx_dist.format.container import Part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.segment_info import Attachment, SegmentInfo
from hsx_dist.page import Segment
from hsx_dist.reading import Run, load_hidden_states
from hsx_dist.reading.column import SampleColumn
from hsx_dist.reading.part_stream import BLOCK, PartStream
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run
from tests.harness.traced_memory import trace_memory

MIB = 1 << 20


def file_with_holes(folder: Path, tokens: int, arrays: int, *, segments: int = 1) -> Path:
    """A part of a few KiB on disk: one layer of one element, token ids, and attached arrays of 64 MiB."""
    attached = {f"a{i}": Attachment("U8", (64 * MIB,), 0) for i in range(arrays)}
    n = tokens // segments
    infos = [
        SegmentInfo(
            Segment("k", i, i * n, (i + 1) * n, tokens), (1,), "bfloat16", 1, min(n, 1 << 20), 1,
            crcs=((0,) * -(-n // min(n, 1 << 20)),), token_crc=0, attached={} if i else attached,
        )
        for i in range(segments)
    ]  # fmt: skip
    header = build_header(Description(NoneCodec(), {}, "segments", tuple(infos)))
    path = folder / "k.safetensors"
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + 10 * tokens + arrays * 64 * MIB)
    return path


@pytest.mark.parametrize(("tokens", "arrays", "segments"), [(40 * MIB, 0, 1), (4, 5, 1), (30 * MIB, 1, 1)])
def test_ids_and_arrays_of_a_file_with_holes_are_refused_before_they_are_fetched(
    tmp_path: Path, tokens: int, arrays: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with_holes(tmp_path, tokens, arrays, segments=segments)
    part = Part.open(LocalStore(tmp_path), path.name)
    monkeypatch.setattr(LocalStore, "get_ranges", None)
    with pytest.raises(FormatError, match=r"token ids and attached arrays of at most 268435456 bytes, got a header"):
        part.load(0, tokens=(0, 1), attached=part.attached_names(0))
    if not arrays:
        with pytest.raises(FormatError, match="token ids and attached arrays"):
            part.token_ids(0)
    if tokens == 4:
        with pytest.raises(FormatError, match="token ids and attached arrays"):
            part.attached(0)


@pytest.mark.parametrize("tokens", [(0, 8), None])
def test_ids_of_many_segments_count_together(tmp_path: Path, tokens: tuple[int, int] | None) -> None:
    path = file_with_holes(tmp_path, 40 * MIB, 0, segments=4)
    # The first 8 tokens need only the ids of the first segment, whose checksum is wrong.
    match = "token ids and attached arrays" if tokens is None else "expected crc32c"
    with pytest.raises(FormatError, match=match):
        load_hidden_states(str(path), tokens=tokens, framework="numpy")


def test_the_variable_allows_more_ids_and_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    check_whole(256 * MIB)
    with pytest.raises(FormatError, match="set HSX_MAX_EXPANSION to 65 or more"):
        check_whole(256 * MIB + 1)
    monkeypatch.setenv(EXPANSION_VARIABLE, "65")
    check_whole(260 * MIB)
    monkeypatch.setenv(EXPANSION_VARIABLE, "1")  # few states, and as many ids as without it
    check_whole(256 * MIB)


def test_a_mask_of_another_length_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store_run(store, [random_sample("k", 9)], attached=lambda _: {"loss_mask": np.ones(9, np.int64)})
    run = Run(store)
    sample = run.at(0)
    assert sample.num_tokens == 9
    assert len(run.select(min_loss_tokens=9)) == 1
    sample.num_tokens = 8
    monkeypatch.setattr(MemoryStore, "get_ranges", None)
    monkeypatch.setattr(Part, "attached", None)
    with pytest.raises(FormatError, match="expected a loss mask of 8 tokens, got shape"):
        sample.loss_mask()


def test_arrays_that_do_not_fit_the_memory_are_a_format_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store_run(store, [random_sample("k", 9)])
    sample = Run(store).at(0)

    def check_ids(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(SampleColumn, "_check_ids", check_ids)
    for read in (sample.token_ids, sample.load, sample.load_carrier, sample.check):
        with pytest.raises(FormatError, match="expected data that fits this machine's memory"):
            read()


@pytest.mark.traced
def test_token_ids_are_not_copied() -> None:
    store = MemoryStore()
    store_run(store, [random_sample("k", 1 << 20, layer_ids=[1], hidden_size=1, chunk_tokens=1 << 16)])
    run = Run(store)
    part = run.open_part(next(n for n in run.manifest.parts))
    part.token_ids(0)
    trace_memory()
    ids = part.token_ids(0)
    assert tracemalloc.get_traced_memory()[1] < 1.2 * ids.nbytes


@pytest.mark.traced
def test_a_range_of_many_blocks_is_in_memory_once(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 6 * BLOCK, np.uint8).tobytes()
    (tmp_path / "p").write_bytes(data)
    stream = PartStream(LocalStore(tmp_path), "p", len(data))
    trace_memory()
    found = stream.get_ranges("p", [(3, 5 * BLOCK), (5 * BLOCK + 7, 5 * BLOCK + 9), (1, 2)])
    assert tracemalloc.get_traced_memory()[1] < 8 * BLOCK
    assert [bytes(view) for view in found] == [data[3 : 5 * BLOCK], data[5 * BLOCK + 7 : 5 * BLOCK + 9], data[1:2]]
    assert stream.finish() == f"{crc32c(data):08x}"
