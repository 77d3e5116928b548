"""Parts with points of a model: the column of each segment, and invalid combinations."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, Fp8TokenCodec, NoneCodec, SplitCodec, ZstdCodec
from hsx_dist.format.container import EncodedPart, EncodedSegment, Part, SegmentEncoder, build_part
from hsx_dist.format.container_read import Loaded
from hsx_dist.page import Segment
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.unit.format.test_container import content, forged, stored

HASH = "0123456789abcdef"
#: A point of two shards, and a point of ids: three columns of sample ``a``.
COLUMNS: tuple[dict[str, Any], ...] = (
    {"column": 0, "columns": 3, "point": "q", "shard": 0, "shards": 2, "head": 8},
    {"column": 1, "columns": 3, "point": "q", "shard": 1, "shards": 2, "head": 8},
    {"column": 2, "columns": 3, "point": "topk_ids"},
)


def encode(codec: Codec, sample: RandomSample, column: dict[str, Any], *, alone: bool = False) -> EncodedSegment:
    encoder = SegmentEncoder(codec, alone=alone)
    for page in sample.pages(replace(sample.segments()[0], sample_hash=HASH, **column)):
        encoder.add(page)
    return encoder.finish()


def samples() -> list[RandomSample]:
    q = [random_sample(seed=seed) for seed in (1, 2)]
    ids = np.random.default_rng(0).integers(0, 128, (37, 3, 2)).astype(np.uint32)
    return [*q, replace(q[0], states=ids, dtype="int32")]


def part_of(codec: Codec) -> EncodedPart:
    return build_part([encode(codec, s, c) for s, c in zip(samples(), COLUMNS, strict=True)], codec, {})


def load(data: bytes) -> list[Loaded]:
    part = opened(data)
    return [part.load(i) for i in range(len(part.segments))]


def opened(data: bytes) -> Part:
    store = stored(part_of(NoneCodec()))
    store.objects["p"] = data
    return Part.open(store, "p", size=len(data))


def header(part: EncodedPart) -> dict[str, Any]:
    return dict(json.loads(part.header[8:])["__metadata__"])


@pytest.mark.parametrize("codec", [NoneCodec(), ZstdCodec(), SplitCodec(), Fp8TokenCodec()], ids=str)
def test_a_part_says_which_column_a_segment_is_of(codec: Codec) -> None:
    part = opened(content(part_of(codec)))
    expected = [Segment("a", 0, 0, 37, 37, **column) for column in COLUMNS]
    assert [info.segment for info in part.segments] == expected
    for made, found in zip(samples(), (part.load(i) for i in range(3)), strict=True):
        assert np.array_equal(found.token_ids, made.token_ids)
        if not codec.lossy or made.dtype == "int32":
            assert np.array_equal(found.states, made.states)
    assert [bool(part.loss(i)) for i in range(3)] == [codec.lossy, codec.lossy, False]


def test_ids_take_no_codec_of_states() -> None:
    """``split`` stores three of four bytes raw."""
    ids = np.random.default_rng(0).integers(0, 128, (512, 1, 8)).astype(np.uint32)
    sample = replace(random_sample(tokens=512, chunk_tokens=512, layer_ids=(3,)), states=ids, dtype="int32")
    part = opened(content(build_part([encode(SplitCodec(), sample, COLUMNS[2])], SplitCodec(), {})))
    assert part.layer_bytes(0)[3] < ids.nbytes / 2
    assert np.array_equal(part.read(0), ids)


def test_only_parts_of_points_are_of_the_newer_version() -> None:
    newer, older = part_of(SplitCodec()), build_part([encode(SplitCodec(), random_sample(), {})], SplitCodec(), {})
    assert header(newer)["format"] == "hsx/2"
    assert header(older)["format"] == "hsx/1"
    assert (
        not {"point", "column", "columns", "shard", "shards", "head"}
        & json.loads(header(older)["hsx"])["common"].keys()
    )


@pytest.mark.parametrize("column", [{"point": "z"}, {"columns": 2}, {"head": 8, "point": "q"}], ids=str)
def test_one_sample_of_points_is_not_in_vllms_schema(column: dict[str, Any]) -> None:
    """A stock reader of vLLM's files would read the point as hidden states."""
    part = build_part([encode(NoneCodec(), random_sample(), column, alone=True)], NoneCodec(), {})
    assert "hidden_states" not in json.loads(part.header[8:])
    assert np.array_equal(load(content(part))[0].states, random_sample().states)


def test_a_version_that_is_not_the_descriptions_is_refused() -> None:
    newer, older = part_of(SplitCodec()), build_part([encode(SplitCodec(), random_sample(), {})], SplitCodec(), {})
    for part, version in ((newer, "hsx/1"), (older, "hsx/2"), (newer, "hsx/3")):
        with pytest.raises(FormatError, match=r"expected format 'hsx/[12]"):
            load(forged(part, lambda _: None, table=lambda h, v=version: h["__metadata__"].update(format=v)))


def test_columns_that_cannot_be_are_refused_by_readers() -> None:
    part, found = part_of(SplitCodec()), []
    for i, name, value in [
        *((2, name, value) for name in ("column", "columns", "shard", "shards", "head") for value in
          (-1, 1 << 60, 10**30, 1.5, "1", None, True)),
        *((2, "point", value) for value in ("", "Q", "q/..", "a" * 65, 3, None, "hidden_states", "\ud800")),
        (2, "columns", 1 << 17), (2, "columns", 2), (2, "shards", 4), (2, "shard", 1), (2, "head", 3),
        (0, "shard", 2), (0, "head", 5), (0, "point", "hidden_states"), (1, "column", 0),
    ]:  # fmt: skip

        def change(body: dict[str, Any], i: int = i, name: str = name, value: Any = value) -> None:
            body["common"].pop(name, None)
            body["segments"][i][name] = value
            for other in body["segments"]:
                other.setdefault(name, COLUMNS[0].get(name, 0))

        try:
            load(forged(part, change))
        except FormatError:
            continue
        found.append((i, name, value))
    assert found == []


@pytest.mark.parametrize("name", ["point", "column", "columns", "shard", "shards", "head"])
def test_a_column_is_said_whole_or_not_at_all(name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        body["common"].pop(name, None)
        for segment in body["segments"]:
            segment.pop(name, None)

    with pytest.raises(FormatError, match=name):
        load(forged(part_of(SplitCodec()), change))


@pytest.mark.parametrize(
    "column",
    [
        {"column": 3}, {"column": -1}, {"columns": 0}, {"columns": 1 << 17}, {"shard": 2}, {"shards": 4}, {"head": 7},
        {"head": -8}, {"point": ""}, {"point": "Q"}, {"point": "hidden_states"},
    ],
    ids=str,
)  # fmt: skip
def test_columns_that_cannot_be_are_refused_by_writers(column: dict[str, Any]) -> None:
    encode(SplitCodec(), random_sample(), COLUMNS[0])
    with pytest.raises(ValueError, match="expected"):
        encode(SplitCodec(), random_sample(), COLUMNS[0] | column)


def test_hidden_states_are_floats() -> None:
    ids = samples()[2]
    with pytest.raises(ValueError, match="hidden states of bfloat16"):
        encode(SplitCodec(), ids, {})


def test_a_part_has_a_segment_of_each_column_once() -> None:
    one, other = (encode(SplitCodec(), s, c) for s, c in zip(samples()[:2], COLUMNS[:2], strict=True))
    assert len(build_part([one, other], SplitCodec(), {}).buffers) > 1
    with pytest.raises(ValueError, match="one twice"):
        build_part([one, one], SplitCodec(), {})


def test_arrays_are_attached_to_the_first_column() -> None:
    encoder = SegmentEncoder(SplitCodec())
    sample = random_sample()
    for page in sample.pages(replace(sample.segments()[0], **COLUMNS[1])):
        encoder.add(page)
    with pytest.raises(ValueError, match="segment 0 alone, of column 0"):
        encoder.finish({"label": np.zeros(3)})


def test_a_header_is_no_longer_than_was_counted_on() -> None:
    columns = [{"column": 2**15 + i, "columns": 2**16, "point": "p" * 64, "shards": 2**16} for i in range(64)]
    segments = [encode(SplitCodec(), random_sample(tokens=1, layer_ids=(3,)), column) for column in columns]
    grown = len(build_part(segments, SplitCodec(), {}).header) - len(build_part(segments[:1], SplitCodec(), {}).header)
    assert grown <= sum(s.header_nbytes for s in segments[1:])
