from __future__ import annotations

import dataclasses
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.names import MAX_KEY, part_name
from hsx_dist.format.receipt import MAX_ROW_KEY, Receipt, RowFate, SegmentProof
from hsx_dist.page import Segment, token_hash
from tests.harness.traced_memory import trace_memory
from tests.soak.claim_kinds import sealed

_COUNT = st.integers(0, 2**48)


@st.composite
def _segments(draw: st.DrawFn) -> Segment:
    start, length, rest = draw(st.tuples(st.integers(0, 2**38), st.integers(1, 2**38), st.integers(0, 2**38)))
    columns = draw(st.integers(1, 3))
    return Segment(
        draw(st.text(min_size=1, max_size=20)),
        draw(st.integers(0, 99)),
        start,
        start + length,
        start + length + rest,
        column=draw(st.integers(0, columns - 1)),
        columns=columns,
    )


@st.composite
def _receipts(draw: st.DrawFn) -> Receipt:
    proofs = tuple(
        SegmentProof(
            s,
            i,
            f"{draw(st.integers(0, 2**64 - 1)):016x}",
            draw(_COUNT),
            draw(_COUNT),
            draw(st.none() | _COUNT),
            f"{draw(st.integers(0, 2**64 - 1)):016x}" if s.columns > 1 else "",
            content=draw(st.sampled_from(["", "00112233445566ff"])),
        )
        for i, s in enumerate(draw(st.lists(_segments(), max_size=4)))
    )
    rows = draw(
        st.lists(
            st.builds(
                RowFate, st.text(), st.none() | _COUNT, st.sampled_from(["refused", "failed"]), st.text(), _COUNT
            ),
            max_size=3,
        )
    )
    size, attempt, sample = draw(_COUNT), draw(st.integers(1, 10**6)), draw(st.sampled_from(["", "a%20b"]))
    return Receipt(
        attempt=attempt,
        writer="w-0",
        seq=draw(st.integers(1, 10**9 - 1)),
        part=part_name(attempt, "w-0", draw(st.integers(1, 10**9 - 1)), sample) if proofs else None,
        size=size,
        crc32c=f"{draw(st.integers(0, 2**32 - 1)):08x}",
        header_bytes=draw(st.integers(0, size)),
        raw_bytes=draw(_COUNT),
        segments=proofs,
        rows=tuple(rows),
        created="2026-01-01T00:00:00Z",
    )


def _example() -> Receipt:
    proof = SegmentProof(Segment("key", 0, 0, 5, 9), 0, "0123456789abcdef", 50, 40, 7, "fedcba9876543210")
    fate = RowFate("bad", 3, "refused", "too long", 1)
    return Receipt(
        1,
        "w-0",
        1,
        "data/part-0001-w-0-000001.safetensors",
        100,
        "0000abcd",
        10,
        50,
        (proof,),
        (fate,),
        "2026-01-01T00:00:00Z",
    )


@settings(deadline=None)
@given(_receipts())
def test_a_written_receipt_is_read_back(receipt: Receipt) -> None:
    data = receipt.to_json()
    assert b"\n" not in data
    assert Receipt.from_json(data) == receipt
    assert json.loads(data)["receipt"]["writer"] == "w-0"


def test_the_bytes_of_receipts_have_not_changed() -> None:
    """Stored receipts outlive this code: a change here is a new format."""
    assert _example().to_json() == (
        b'{"crc32c":"7819fc2a","receipt":{"format":"hsx-receipt/1","attempt":1,"writer":"w-0","seq":1,'
        b'"part":"data/part-0001-w-0-000001.safetensors","size":100,"crc32c":"0000abcd","header_bytes":10,"raw_bytes":50,'
        b'"segment_columns":["key","index","start","stop","total","slot","token_hash","raw_bytes","stored_bytes","row",'
        b'"sample_hash"],"segments":[["key",0,0,5,9,0,"0123456789abcdef",50,40,7,"fedcba9876543210"]],'
        b'"row_columns":["key","row","fate","reason","tries","content"],"rows":[["bad",3,"refused","too long",1,""]],'
        b'"created":"2026-01-01T00:00:00Z"}}'
    )


def test_contents_are_a_member_that_older_readers_ignore() -> None:
    proof = dataclasses.replace(_example().segments[0], content="00112233445566ff")
    data = dataclasses.replace(_example(), segments=(proof,)).to_json()
    assert json.loads(data)["receipt"].pop("contents") == ["00112233445566ff"]
    assert Receipt.from_json(data).segments[0].content == "00112233445566ff"


@pytest.mark.parametrize("contents", [[], ["", ""], ["00112233445566FF"], ["0"], [None], 7, "0", {"a": 1}])
def test_contents_that_are_no_hashes_are_refused(contents: Any) -> None:
    body = json.loads(_example().to_json())["receipt"] | {"contents": contents}
    with pytest.raises(FormatError):
        Receipt.from_json(sealed(body))


def _of_columns() -> Receipt:
    segments = [Segment("key", 0, 0, 9, 9, column=i, columns=2, point="q") for i in range(2)]
    proofs = [SegmentProof(s, i, "0123456789abcdef", 50, 40, 7, "fedcba9876543210") for i, s in enumerate(segments)]
    return dataclasses.replace(_example(), segments=tuple(proofs))


def test_a_receipt_of_columns_is_refused_by_older_readers() -> None:
    """They would read each column as the whole sample."""
    body = json.loads(_of_columns().to_json())["receipt"]
    assert body["format"] == "hsx-receipt/2"
    assert body["segment_columns"][-2:] == ["column", "columns"]
    assert [row[-2:] for row in body["segments"]] == [[0, 2], [1, 2]]
    found = Receipt.from_json(_of_columns().to_json())
    # The part, not the receipt, names the point of a column.
    assert [p.segment for p in found.segments] == [Segment("key", 0, 0, 9, 9, column=i, columns=2) for i in range(2)]


@pytest.mark.parametrize(
    ("column", "columns"), [(2, 2), (-1, 2), (0, 0), (0, 1 << 17), (True, 2), ("0", 2), (0, 2.0), (None, 2), (0, None)]
)
def test_impossible_columns_are_refused(column: object, columns: object) -> None:
    body = json.loads(_of_columns().to_json())["receipt"]
    body["segments"][0][-2:] = [column, columns]
    with pytest.raises(FormatError, match="segments: expected"):
        Receipt.from_json(_sealed(body))


def test_columns_need_the_hash_of_their_sample() -> None:
    body = json.loads(_of_columns().to_json())["receipt"]
    body["segments"][1][10] = ""
    with pytest.raises(FormatError, match="sample's hash"):
        Receipt.from_json(_sealed(body))


@pytest.mark.parametrize(("receipt", "version"), [(_of_columns(), 1), (_example(), 2)])
def test_the_version_is_that_of_the_content(receipt: Receipt, version: int) -> None:
    body = json.loads(receipt.to_json())["receipt"] | {"format": f"hsx-receipt/{version}"}
    with pytest.raises(FormatError, match="expected"):
        Receipt.from_json(_sealed(body))
    if version == 2:
        rows = [[*row, 0, 1] for row in body["segments"]]
        columns = [*body["segment_columns"], "column", "columns"]
        with pytest.raises(FormatError, match="samples of one column"):
            Receipt.from_json(_sealed(body | {"segments": rows, "segment_columns": columns}))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_changed_byte_of_a_receipt_is_detected(data: st.DataObject) -> None:
    good = _example().to_json()
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError, match="the object's name"):
        Receipt.from_json(bytes(changed), "the object's name")


@settings(deadline=None)
@given(st.integers(0, len(_example().to_json()) - 1))
def test_every_truncation_of_a_receipt_is_detected(length: int) -> None:
    with pytest.raises(FormatError):
        Receipt.from_json(_example().to_json()[:length])


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_anything_else_is_no_receipt(data: bytes) -> None:
    with pytest.raises(FormatError):
        Receipt.from_json(data)


def _sealed(body: object) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"crc32c":"%s","receipt":%s}' % (crc32c_hex(crc32c(text)).encode(), text)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "hsx-receipt/3"},
        {"attempt": 0},
        {"attempt": True},
        {"attempt": 1.0},
        {"seq": -1},
        {"seq": 2**70},
        {"writer": None},
        {"part": "../../etc/passwd"},
        {"part": "/absolute"},
        {"part": None},
        {"size": 5},
        {"crc32c": "xyz"},
        {"segments": 3},
        {"segments": [["key", 0, 0, 5, 9, 0, "0123456789abcdef", 50, 40]]},
        {"segments": [["key", 0, 5, 5, 9, 0, "0123456789abcdef", 50, 40, 7]]},
        {"segments": [["key", 0, 0, 10, 9, 0, "0123456789abcdef", 50, 40, 7]]},
        {"segments": [["key", 0, -1, 5, 9, 0, "0123456789abcdef", 50, 40, 7]]},
        {"segments": [["key", 0, 0, 5, 9, 1, "0123456789abcdef", 50, 40, 7]]},
        {"segments": [["", 0, 0, 5, 9, 0, "0123456789abcdef", 50, 40, 7]]},
        {"segments": [["key", 0, 0, 5, 9, 0, "nothex", 50, 40, 7]]},
        {"rows": [["k", 0, "lost", "x", 1]]},
        {"rows": [["k", 0, ["failed"], "x", 1]]},
        {"segment_columns": ["key"]},
        {"created": 5},
    ],
)
def test_receipts_with_impossible_values_are_refused(change: dict[str, object]) -> None:
    body = json.loads(_example().to_json())["receipt"]
    with pytest.raises(FormatError, match="here"):
        Receipt.from_json(_sealed(body | change), "here")


def test_keys_have_a_limit() -> None:
    """Writers have the same limits. A key is in log lines and errors of its sample."""
    body = json.loads(_example().to_json())["receipt"]
    (segment, *_), (row, *_) = body["segments"], body["rows"]

    def read(key: int, row_key: int) -> Receipt:
        segments = [["\u00e9" * key, *segment[1:5], 0, *segment[6:]]]
        return Receipt.from_json(
            _sealed(body | {"segments": segments, "rows": [["r" * row_key, *row[1:]]]} | {"contents": [""]})
        )

    assert len(read(MAX_KEY, MAX_ROW_KEY).segments[0].segment.key) == MAX_KEY == 1024
    for keys in ((MAX_KEY + 1, 1), (1, MAX_ROW_KEY + 1)):
        with pytest.raises(FormatError, match="expected keys of at most"):
            read(*keys)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"nonsense", b"\xff\xfe", b"[]", b"9" * 5000, b"{}"])
def test_bodies_that_are_no_receipts(text: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        Receipt.from_json(_sealed(text), "here")


def test_members_of_later_versions_are_ignored() -> None:
    body = json.loads(_example().to_json())["receipt"]
    assert Receipt.from_json(_sealed(body | {"later": [1]})) == _example()


@pytest.mark.traced
@pytest.mark.parametrize("unit", [b'{"a":"bc"},"de","fg",', '[],"\u0101","\u0101","",0,'.encode()])
def test_members_of_later_versions_are_not_decoded(unit: bytes) -> None:
    """Decoded, such lists and objects take up to 30 times the memory of their text."""
    body = _example().to_json()[:-2].partition(b'"receipt":')[2]
    text = body + b',"later":[' + unit * 20_000 + b'"]}"]}'
    data = b'{"crc32c":"' + crc32c_hex(crc32c(text)).encode() + b'","receipt":' + text + b"}"
    trace_memory()
    assert Receipt.from_json(data) == _example()
    assert tracemalloc.get_traced_memory()[1] < 5 * len(data)


@pytest.mark.traced
@pytest.mark.parametrize("name", ["segments", "contents", "rows", "part", "void"])
def test_an_object_in_a_member_ends_the_decoding(name: str) -> None:
    body = json.loads(_example().to_json())["receipt"]
    sealed = _sealed(body | {name: [{"a": "bcdefgh"}] * 20_000})
    trace_memory()
    with pytest.raises(FormatError, match="expected JSON without objects, got an object"):
        Receipt.from_json(sealed)
    assert tracemalloc.get_traced_memory()[1] < 5 * len(sealed)


def test_a_damaged_receipt_is_an_integrity_error() -> None:
    data = _example().to_json().replace(b"data/p", b"data/q")
    with pytest.raises(IntegrityError, match="crc32c"):
        Receipt.from_json(data)


def test_a_stored_reason_is_only_made_short_and_printable() -> None:
    reason = "me:pw@host \x1b " + "x" * 2000
    assert RowFate("k", 0, "failed", reason, 1, stored=True).reason.startswith("me:pw@host \\x1b xxx")
    assert len(RowFate("k", 0, "failed", reason, 1, stored=True).reason) == 1000
    assert RowFate("k", 0, "failed", reason, 1).reason.startswith("me:(not shown)@host")


def test_receipts_pickle() -> None:
    assert pickle.loads(pickle.dumps(_example())) == _example()
    assert dataclasses.replace(_example(), seq=2).id == (1, "w-0", 2)


def test_the_hash_of_token_ids_is_of_their_values() -> None:
    ids = np.arange(10, dtype=np.int64)
    assert token_hash(ids) == token_hash(ids.astype(np.int32)) == token_hash(np.repeat(ids, 2)[::2])
    assert token_hash(ids) != token_hash(ids[:-1])
    assert token_hash(np.array([1, 2, 3])) == "77ba1ae68d5afbb4"


@pytest.mark.parametrize(
    "part",
    [
        *("checkpoint.pt", "../other/data/part-0001-w-000001.safetensors", "/data/part-0001-w-000001.safetensors"),
        *(part_name(1, "v", 1), part_name(2, "w", 1), f"data/{part_name(1, 'w', 1)}", "run.json", ""),
        *(part_name(1, "w", 1, "\n"), part_name(1, "w", 1, "x" * 1100)),
    ],
)
def test_a_receipt_names_only_a_part_that_its_writer_stored(part: str) -> None:
    """Retention deletes the part that a receipt names."""
    segment = SegmentProof(Segment("k", 0, 0, 1, 1), 0, "0" * 16, 1, 1, 0)
    receipt = Receipt(1, "w", 1, part_name(1, "w", 1), 9, "00000000", 0, 0, (segment,), (), "t")
    assert Receipt.from_json(receipt.to_json()) == receipt
    with pytest.raises(FormatError, match="expected the name of a part of writer w, got"):
        Receipt.from_json(dataclasses.replace(receipt, part=part).to_json())


@pytest.mark.parametrize("void", [["a"], ["data/a"], [7], [f"data/part-0001-w-000001={'a' * 1024}.safetensors"]])
def test_lost_parts_have_names_of_parts(void: list[Any]) -> None:
    """Names of a few characters would take many times their bytes."""
    body = json.loads(_example().to_json())["receipt"]
    with pytest.raises(FormatError, match="void: expected"):
        Receipt.from_json(sealed(body | {"void": void}))
    names = [part_name(1, "w-0", 1), part_name(2, "w-0", 1, "a%20b")]
    assert Receipt.from_json(sealed(body | {"void": names})).void == tuple(names)
