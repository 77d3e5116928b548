"""Small objects with large claims are refused before anything is allocated, counted or expanded for them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save

from hsx_dist.cli.inspect import _totals, print_run
from hsx_dist.cli.tables import layers_text
from hsx_dist.errors import FormatError, IntegrityError, SampleNotFound
from hsx_dist.format import compacted
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.codecs import NoneCodec, ZstdCodec
from hsx_dist.format.codecs.base import EXPANSION_VARIABLE, check_expansion
from hsx_dist.format.container import Part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.json_objects import MAX_JSON_BYTES, MAX_JSON_VALUES, dump_json, read_json
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.names import LARGEST_NUMBER, parse_receipt_name, receipt_name
from hsx_dist.format.place import open_place, read_run
from hsx_dist.format.runs import (
    check_receipts,
    load_manifest,
    newest_and_complete,
    newest_attempt,
    read_complete,
    read_heartbeat,
    take_attempt,
    write_complete,
)
from hsx_dist.format.sample_record import Totals
from hsx_dist.format.segment_info import SegmentInfo
from hsx_dist.format.segments import exact_sum
from hsx_dist.page import Segment
from hsx_dist.reading import load_hidden_states, open_run
from hsx_dist.reading.retention import Retention, used_by_all
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import Store
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness import runs as testing_runs
from tests.harness.runs import RunWriter, unsealed
from tests.harness.traced_memory import trace_memory
from tests.soak.claim_kinds import sealed
from tests.soak.claims import KINDS, run_limited

#: Objects of version 1, whose names are known in advance.
store_run = partial(testing_runs.store_run, version=1)


@contextmanager
def little_memory(most: int = 64 << 20) -> Iterator[None]:
    """Fail if Python and numpy allocate more than ``most`` bytes in the block."""
    trace_memory()
    yield
    assert tracemalloc.get_traced_memory()[1] < most


def small_run(complete: bool = True) -> MemoryStore:
    store = MemoryStore()
    store_run(store, [random_sample("a", 20)])
    if not complete:
        store.delete("attempts/0001.complete.json")
    return store


@pytest.mark.soak  # the tests below have the single cases, and tests/soak/run.py hundreds of each kind
def test_objects_that_claim_much_are_read_in_little_memory() -> None:
    found = run_limited(1, 7)
    assert set(found) == set(KINDS)
    assert sum("FormatError" in outcomes for outcomes in found.values()) >= 5


def test_long_keys_and_reasons_of_rows_are_shown_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A receipt of few bytes, compressed, may have a reason of millions of characters, and each is shown as six."""
    store = LocalStore(tmp_path)
    store_run(store, [random_sample("a", 20)])
    name = receipt_name(1, "w", 1)
    body = json.loads(store.get(name))["receipt"]
    body["rows"] = [
        [key, 1, fate, "\u202e" * 20_000, 1, ""] for key, fate in (("b", "failed"), ("c" * 8_000, "refused"))
    ]
    store.put(name, [sealed(body)])
    store.delete("attempts/0001.complete.json")
    write_complete(store, 1, load_manifest(store), {})
    run = open_run(store.url)
    print_run(store.url, (), as_json=False)
    assert max(map(len, capsys.readouterr().out.splitlines())) < 2100
    with pytest.raises(SampleNotFound, match=r"its row failed: \\u202e\\u202e") as e:
        run["b"]
    assert len(str(e.value)) < 2000
    assert {len(fate.reason) for fate in (*run.refused.values(), *run.failed.values())} <= set(range(990, 1001))
    assert not list(check_receipts(store, load_manifest(store).receipts))


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "manifest/0001/w/999999999999.json",
        "manifest/0001/w/٠٠٠٠٠٢.json",
        "manifest/٠٠٠١/w/000001.json",
        "manifest/0001/w/000000.json",
        "manifest/0000/w/000001.json",
        "manifest/00001/w/000001.json",
        "manifest/0001/w/0000001.json",
        "manifest/0001/é/000001.json",
        f"manifest/{'9' * 30}/w/000001.json",
    ],
)
def test_a_name_that_no_writer_makes_is_no_receipts(name: str) -> None:
    assert parse_receipt_name(name) is None
    store = small_run(complete=False)
    store.put(name, [b""])
    assert len(load_manifest(store).samples) == 1


@pytest.mark.traced
def test_a_large_number_in_a_name_is_not_counted_up_to() -> None:
    store = small_run(complete=False)
    store.put(receipt_name(1, "w", LARGEST_NUMBER), [b""])
    with little_memory(), pytest.raises(IntegrityError, match="999999997 missing before"):
        load_manifest(store)


def test_attempts_are_those_that_are_listed() -> None:
    store = small_run()
    for name in (f"attempts/{'9' * 30}.json", "attempts/٠٠٠٩.json", "attempts/00009.json"):
        store.put(name, [b"{}"])
    assert newest_attempt(store) == 1
    store.put(f"attempts/{LARGEST_NUMBER - 1}.json", [b"{}"])
    retention = Retention(open_place(store))
    retention._refresh()
    retention._refresh()  # must not list once for each lower number
    assert take_attempt(store, {}) == LARGEST_NUMBER
    with pytest.raises(FormatError, match="numbered up to"):
        take_attempt(store, {})


def test_what_one_attempt_completed_under_the_name_of_another_is_refused() -> None:
    store = small_run()
    store.put("attempts/0002.json", [store.objects["attempts/0001.json"]])
    store.put("attempts/0002.complete.json", [store.objects["attempts/0001.complete.json"]])
    for read in (read_complete, newest_and_complete, lambda s: read_complete(s, 2), load_manifest):
        with pytest.raises(FormatError, match=r"expected the object of attempt 2, got that of attempt 1"):
            read(store)
    assert (read_complete(store, 1) or {})["attempt"] == 1


def test_a_mark_of_a_rank_that_there_is_not_does_not_count() -> None:
    store = MemoryStore()
    store.put("consumed/p/default.0of2.json", [b""])
    store.put("consumed/p/default.5of2.json", [b""])
    store.put("consumed/p/default.0of0.json", [b""])
    assert not used_by_all(store.list("consumed/p/"), frozenset({"default"}))
    store.put("consumed/p/default.1of2.json", [b""])
    assert used_by_all(store.list("consumed/p/"), frozenset({"default"}))


# -- the compacted manifest ------------------------------------------------------------------------------------------


def _forge(store: Store, data: bytes, raw_size: int, receipts: int = 1) -> None:
    complete = unsealed(store.get("attempts/0001.complete.json"))
    about = complete["manifest"]
    about |= {"size": len(data), "crc32c": crc32c_hex(crc32c(data)), "raw_size": raw_size, "receipts": receipts}
    store.put(about["name"], [data])
    store.put("attempts/0001.complete.json", [json.dumps(complete).encode()])


def _zeros(nbytes: int, unit: bytes = b"\0") -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    block = unit * ((1 << 20) // len(unit))
    return b"".join([*(packer.compress(block) for _ in range(nbytes >> 20)), packer.flush()])


@pytest.mark.traced
def test_lines_that_promise_gibibytes_are_not_read() -> None:
    store = small_run()
    _forge(store, _zeros(64 << 20), 64 << 30)
    with little_memory():
        assert len(load_manifest(store).samples) == 1  # from the single receipts


@pytest.mark.traced
def test_bytes_after_the_frame_do_not_raise_the_limit() -> None:
    store = small_run()
    _forge(store, _zeros(64 << 20, b"[],") + bytes(8 << 20), 64 * 1_048_575)
    with little_memory(), pytest.raises(FormatError, match=r"zstandard frame|expected one frame"):
        load_manifest(store)


def test_a_window_is_not_allocated_because_a_frame_claims_it() -> None:
    store = small_run()
    parameters = zstandard.ZstdCompressionParameters(compression_level=1, window_log=27, write_content_size=0)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    _forge(store, packer.compress(b"x\n") + packer.flush(), 2)
    with pytest.raises(FormatError, match="zstandard frame"):
        load_manifest(store)


def test_files_with_holes_do_not_raise_the_limit(tmp_path: Path) -> None:
    """A compacted manifest of few bytes must not expand because sparse files claim many."""
    store = LocalStore(tmp_path)
    store_run(store, [random_sample("a", 20)])
    data = _zeros(64 << 20, b"[],")
    _forge(store, data, 64 * 1_048_575)
    name = tmp_path / receipt_name(1, "w", 1)
    os.truncate(name, 0)
    os.truncate(name, 100_000_000)
    with pytest.raises(FormatError, match=r"manifest/0001/w/000001\.json"):
        load_manifest(store)


def test_lines_that_expand_much_need_the_single_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of lines takes many bytes as receipts, so a small object must not promise many lines."""
    monkeypatch.setattr(compacted, "_FREE_BYTES", 1 << 16)
    store = MemoryStore()
    store_run(store, [random_sample(f"{'a' * 300}{i}", 1) for i in range(400)])
    about = unsealed(store.objects["attempts/0001.complete.json"])["manifest"]
    assert 8 < (about["raw_size"] - (1 << 16)) / about["size"] < 32
    assert len(load_manifest(store).samples) == 400
    for name in [info.name for info in store.list("manifest/0001/w/")]:
        store.delete(name)
    with pytest.raises(IntegrityError, match="single receipts up to attempt 1, got 0"):
        load_manifest(store)


def test_a_compacted_manifest_above_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacted, "MAX_COMPACTED_BYTES", 10)
    with pytest.raises(FormatError, match="expected at most 10 bytes"):
        load_manifest(small_run())


def test_a_repeated_line_is_refused() -> None:
    store = small_run()
    line = next(iter(load_manifest(store).receipts)).to_json() + b"\n"
    _forge(store, zstandard.ZstdCompressor().compress(line * 2), 2 * len(line), 2)
    with pytest.raises(FormatError, match="none is repeated"):
        load_manifest(store)


# -- JSON objects ----------------------------------------------------------------------------------------------------


@pytest.mark.traced
@pytest.mark.parametrize(
    "name", ["run.json", "attempts/0001.heartbeat.json", "attempts/0001.complete.json", "attempts/0001.json"]
)
def test_a_large_object_where_a_small_one_is_expected_is_not_fetched(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    store.put(name, [b"{"])
    os.truncate(tmp_path / name, 1 << 40)  # a sparse file
    with little_memory(), pytest.raises(FormatError, match=f"at most {MAX_JSON_BYTES} bytes"):
        read_json(store, name)


@pytest.mark.parametrize("checksum", [b',"crc32c":"00000000"}', b"}"])
def test_a_nested_object_is_not_indented_to_many_times_its_size(tmp_path: Path, checksum: bytes) -> None:
    """The checksum is that of indented JSON, which commands print. Here it would have 50 MB."""
    store = LocalStore(tmp_path)
    store.put("run.json", [b'{"a":' + b"[" * 197 + b"1" + b",1" * 249_000 + b"]" * 197 + checksum])
    with pytest.raises(FormatError, match=f"run.json: expected at most {MAX_JSON_BYTES} bytes of indented JSON"):
        read_json(store, "run.json")
    value = {"a": [[1, "\u00e9"], {}], "b": 0.5}
    store.put("run.json", [json.dumps(json.loads(dump_json(value))).encode()])  # not indented, with its checksum
    assert read_json(store, "run.json") == value


@pytest.mark.traced
@pytest.mark.parametrize("unit", [b'{"a":0}', b"[]", b"0"])
def test_an_object_of_very_many_values_is_not_parsed(tmp_path: Path, unit: bytes) -> None:
    store = LocalStore(tmp_path)
    body = b'{"settings":{"x":[' + b",".join([unit] * ((3 << 20) // (len(unit) + 1))) + b"]}}"
    store.put("run.json", [body])
    with little_memory(), pytest.raises(FormatError, match=f"at most {MAX_JSON_VALUES} JSON values"):
        read_json(store, "run.json")


def test_an_object_of_very_many_values_is_not_made() -> None:
    with pytest.raises(FormatError, match=f"at most {MAX_JSON_VALUES} JSON values"):
        dump_json({"x": [0] * (MAX_JSON_VALUES + 1)})


@pytest.mark.traced
def test_a_large_receipt_is_not_fetched(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store_run(store, [random_sample("a", 20)])
    store.delete("attempts/0001.complete.json")
    os.truncate(tmp_path / "manifest/0001/w/000001.json", 1 << 40)
    with little_memory(), pytest.raises(FormatError, match="at most 100000000 bytes"):
        load_manifest(store)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"9" * 5000, b'{"a":1,"a":2}', b"[]", b"\xff", b""]
)
def test_json_that_is_deep_or_doubled_or_no_object_is_a_format_error(body: bytes) -> None:
    store = MemoryStore()
    store.put("x", [body])
    with pytest.raises(FormatError, match="test://memory/x"):
        read_json(store, "x")


def _read_all(store: MemoryStore) -> None:
    read_run(store)
    read_heartbeat(store, 1)
    read_complete(store)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run.json", {"meaning": []}),
        ("run.json", {"settings": 7}),
        ("run.json", {"meaning": {"layers": [[]]}}),
        ("run.json", {"meaning": {"layers": list(range(1025))}}),  # `hsx ls --json` prints them with each sample
        ("run.json", {"meaning": {"layers": [10**100]}}),
        ("run.json", {"meaning": {"model": {}}}),
        ("run.json", {"first_rows": {"a": []}}),
        ("run.json", {"format": [[]]}),
        ("attempts/0001.heartbeat.json", {"progress": 7}),
        ("attempts/0001.heartbeat.json", {"progress": {"rows": "x"}}),
        ("attempts/0001.heartbeat.json", {"progress": {"rows": 1.5}}),
        ("attempts/0001.heartbeat.json", {"progress": {"seconds": 10**400}}),
        ("attempts/0001.heartbeat.json", {"progress": {"counted": None}}),
        ("attempts/0001.heartbeat.json", {"progress": {"fates": {"stored": "x"}}}),
        ("attempts/0001.heartbeat.json", {"value": {}}),
        ("attempts/0001.heartbeat.json", {"state": []}),
        ("attempts/0001.complete.json", {"summary": {"rows": "x"}}),
        ("attempts/0001.complete.json", {"summary": []}),
        ("attempts/0001.complete.json", {"counts": {"samples": {}}}),
        ("attempts/0001.complete.json", {"attempt": 10**30}),
        ("attempts/0001.complete.json", {"manifest": {"size": -1}}),
    ],
)
def test_members_of_other_types_are_format_errors(name: str, change: dict[str, Any]) -> None:
    store = small_run()
    known = unsealed(store.objects.get(name, b"{}"))
    store.put(name, [json.dumps(known | change).encode()])
    with pytest.raises(FormatError, match=name):
        _read_all(store)


# -- receipts --------------------------------------------------------------------------------------------------------


def _receipt_with(**changes: Any) -> bytes:
    store = small_run()
    body = json.loads(store.objects["manifest/0001/w/000001.json"])["receipt"]
    row = dict(zip(body["segment_columns"], body["segments"][0], strict=True))
    body["segments"] = [list((row | {k: v for k, v in changes.items() if k in row}).values())]
    return sealed(body | {k: v for k, v in changes.items() if k not in row or k == "raw_bytes"})


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": 2**60},
        {"raw_bytes": 2**61},
        {"raw_bytes": -5},
        {"stored_bytes": 2**61},
        {"stop": 2**50, "total": 2**50},
        {"attempt": 10**12},
        {"seq": 10**12},
        {"writer": "a/b"},
        {"part": "data/\ud800"},
        {"part": "data/a\nb"},
        {"part": "data/.hsx-unfinished-0"},  # no store reads such a name
        {"slot": 0.0},
    ],
)
def test_a_receipt_with_counts_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    store = small_run(complete=False)
    store.put("manifest/0001/w/000001.json", [_receipt_with(**changes)])
    with pytest.raises(FormatError):
        load_manifest(store)


@pytest.mark.parametrize("raw_bytes", [-5, 2**61])
def test_a_receipts_own_raw_bytes_are_limited(raw_bytes: int) -> None:
    store = small_run(complete=False)
    body = json.loads(_receipt_with())["receipt"]
    store.put("manifest/0001/w/000001.json", [sealed(body | {"raw_bytes": raw_bytes})])
    with pytest.raises(FormatError, match="raw_bytes"):
        load_manifest(store)


def test_totals_of_many_large_segments_do_not_wrap() -> None:
    assert exact_sum(np.full(5000, 2**52, np.int64)) == 5000 * 2**52
    assert exact_sum(np.array([2**62, 2**62, 2**62, -1])) == 3 * 2**62 - 1
    assert exact_sum(np.empty(0, np.int64)) == 0
    assert Manifest().totals().raw_bytes == 0
    numbers = np.zeros((1 << 13, 8), np.int64)
    numbers[:, 2:6] = 1 << 50
    totals = Totals()
    totals.add(numbers)
    assert (totals.tokens, totals.raw_bytes, totals.stored_bytes) == (1 << 63, 1 << 63, 1 << 63)

    class ManySamples:
        index = SimpleNamespace(tokens=numbers[:, 2], raw_bytes=numbers[:, 4], parts_in_use=list)
        refused = failed = ()
        __len__ = numbers.__len__

    listed = _totals(cast(Any, ManySamples()))
    assert (listed["tokens"], listed["raw_bytes"]) == (1 << 63, 1 << 63)


@pytest.mark.traced
def test_ids_of_layers_far_apart_are_not_counted_through() -> None:
    with little_memory():
        assert layers_text([0, 5, 2**40]) == f"0,5,{2**40}"
    assert layers_text([3, 4, 5]) == "3-5"


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.traced
def test_a_plain_file_of_300_bytes_with_many_tokens_is_refused(tmp_path: Path) -> None:
    n = 2**36
    table = {
        "hidden_states": {"dtype": "BF16", "shape": [n, 1, 1], "data_offsets": [0, 2 * n]},
        "token_ids": {"dtype": "I64", "shape": [n], "data_offsets": [2 * n, 10 * n]},
    }
    body = json.dumps(table).encode()
    path = tmp_path / "p.safetensors"
    path.write_bytes(struct.pack("<Q", len(body)) + body)
    assert path.stat().st_size < 320
    with little_memory(), pytest.raises(FormatError, match="cut short"):
        load_hidden_states(str(path), framework="numpy")


def _description(segments: int, layers: int, **shared: Any) -> str:
    common = {
        "index": 0,
        "start": 0,
        "stop": 1,
        "total": 1,
        "dtype": "float32",
        "hidden_size": 1,
        "chunk_tokens": 1,
        "token_crc": 0,
        "layer_ids": list(range(layers)),
        "crcs": [[0]] * layers,
        **shared,
    }
    items = [{"key": f"{i}"} for i in range(segments)]
    body = {"codec": {"name": "none"}, "about": {}, "schema": "segments", "common": common, "segments": items}
    return json.dumps(body)


@pytest.mark.parametrize("plain", [False, True])
def test_a_segment_has_at_most_1024_layers(plain: bool) -> None:
    """Each layer of a plain part costs a few bytes. Statistics have an object for each layer."""
    if plain:
        states, ids = np.zeros((1, 1025, 1), np.float16), np.zeros(1, np.int64)
        store = MemoryStore()
        store.put("p", [save({"hidden_states": states, "token_ids": ids})])
        with pytest.raises(FormatError, match=r"layers: expected .*1024, got 1025"):
            Part.open(store, "p")
    else:
        with pytest.raises(FormatError, match=r"layers: expected .*1024, got 1025"):
            Description.from_json(_description(1, 1025))


@pytest.mark.traced
@pytest.mark.parametrize(
    "text",
    [
        _description(5000, 1000),
        _description(5000, 1, **{f"unknown{i}": 0 for i in range(5000)}),
        _description(3000, 1, crcs=[[0] * 20_000], stop=20_000, total=20_000),
        _description(3000, 1, loss=[[0, 0]] * 20_000),
        _description(3000, 1, attached={f"a{i}": ["U8", [0], 0] for i in range(5000)}),
    ],
)
def test_what_segments_share_is_not_multiplied(text: str) -> None:
    with little_memory(), pytest.raises(FormatError, match=r"all segments together|of 1 layers|at most 1000 members"):
        Description.from_json(text)


def test_a_few_segments_may_share_their_layers() -> None:
    assert len(Description.from_json(_description(3, 5)).segments) == 3


@pytest.mark.parametrize("shape", [[1 << 26, 1 << 26, 1 << 26, 0], [1 << 26] * 7 + [0], [0, 1 << 26, 2], [1] * 9])
def test_an_attached_array_of_large_dimensions_is_refused_also_without_elements(shape: list[int]) -> None:
    with pytest.raises(FormatError, match="attached 'a': expected a dtype, a small shape"):
        Description.from_json(_description(1, 1, attached={"a": ["U8", shape, 0]}))
    sample = random_sample("a", 20)
    if len(shape) < 4:  # numpy has no arrays of the larger shapes
        with pytest.raises(ValueError, match="a dimension of 0 counts as 1"):
            store_run(MemoryStore(), [sample], attached={"a": np.empty(shape, np.uint8)})


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0, 4)])
def test_attached_arrays_without_elements_are_read(shape: tuple[int, ...]) -> None:
    store = MemoryStore()
    store_run(store, [random_sample("a", 20)], attached={"a": np.empty(shape, np.float64)})
    assert open_run_of(store)["a"].attached()["a"].shape == shape


def test_deep_values_in_a_description_are_a_format_error() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    for change in ({"about": {"x": deep}}, {"codec": {"name": "none", "x": deep}}):
        with pytest.raises(FormatError, match="deep"):
            Description.from_json(json.dumps(json.loads(_description(1, 1)) | change))
    for name in ("hidden_size", "layer_ids", "crcs", "stop", "meta"):
        with pytest.raises(FormatError):
            Description.from_json(_description(1, 1, **{name: {"x": deep} if name == "meta" else deep}))


def test_frames_that_expand_too_much_need_a_word_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    check_expansion(64 << 20, 1)
    check_expansion((64 << 20) + 64_000, 1000)
    with pytest.raises(FormatError, match=EXPANSION_VARIABLE):
        check_expansion((64 << 20) + 64_001, 1000)
    monkeypatch.setenv(EXPANSION_VARIABLE, "32768")
    check_expansion((64 << 20) + 64_001, 1000)


def test_states_that_expand_too_much_are_refused_before_the_token_ids_are_fetched() -> None:
    """A file with holes has token ids of any size."""
    n, store = 1 << 22, MemoryStore()
    frame = ZstdCodec().encode(np.zeros((n, 8), np.uint32), "float32")[0]
    info = SegmentInfo(Segment("a", 0, 0, n, n), (0,), "float32", 8, n, 1, ((len(frame),),), ((0,),), 0)
    head = build_header(Description(ZstdCodec(), {}, "segments", (info,)))
    store.put("p", [head])
    part = Part.open(store, "p", header_bytes=len(head), size=len(head) + 8 * n + len(frame))
    with pytest.raises(FormatError, match=EXPANSION_VARIABLE):
        part.load(0, tokens=(0, 8))


def test_a_large_range_that_is_only_claimed_is_not_requested() -> None:
    n, store = 1 << 16, MemoryStore()
    info = SegmentInfo(Segment("a", 0, 0, n, n), (0,), "bfloat16", 1024, n, 1, crcs=((0,),), token_crc=0)
    description = Description(NoneCodec(), {}, "vllm", (info,))
    head = build_header(description)
    store.put("p", [head])
    size = len(head) + description.data_bytes
    part = Part.open(store, "p", header_bytes=len(head), size=size)
    with pytest.raises(FormatError, match=f"expected {size} bytes, got {len(head)}"):
        part.read(0)


def test_verify_and_load_refuse_the_same_states() -> None:
    """Each of the three layers is small enough, and all three are not."""
    ids, store = np.arange(16), MemoryStore()
    zeros = RandomSample("a", np.zeros((16, 3, 1 << 20), np.uint16), ids, (0, 1, 2), "bfloat16", 16)
    store_run(store, [zeros], codec=ZstdCodec())
    with pytest.raises(FormatError, match=EXPANSION_VARIABLE):
        open_run_of(store)["a"].load(framework="numpy")
    (problem,) = verify_run(store).problems
    assert EXPANSION_VARIABLE in problem.message
    assert problem.part in problem.message


def test_segments_of_a_long_sample_are_not_allocated_because_receipts_claim_them() -> None:
    store = MemoryStore()
    store_run(store, [])
    store.delete("attempts/0001.complete.json")
    sample = random_sample("long", 40)
    writer = RunWriter(store, name="v")
    writer.put([(sample, s, 0) for s in sample.segments(20)])
    assert open_run_of(store)["long"].load(framework="numpy")["hidden_states"].shape[0] == 40
    [name] = [n for n in store.objects if n.startswith("data/")]
    store.objects[name] = store.objects[name][: len(store.objects[name]) // 2]
    with pytest.raises(FormatError):
        open_run_of(store)["long"].load(framework="numpy")


def open_run_of(store: MemoryStore) -> Any:
    from hsx_dist.reading import Run

    return Run(store)


def test_a_header_larger_than_the_format_allows_is_not_fetched() -> None:
    store = MemoryStore()
    store.put("p", [bytes(100)])
    with pytest.raises(FormatError, match="expected a header of 8 to 100000008 bytes"):
        Part.open(store, "p", header_bytes=1 << 40, size=1 << 41)


# -- byte order ------------------------------------------------------------------------------------------------------


def test_a_file_with_holes_that_does_not_fit_into_memory_is_a_format_error(tmp_path: Path) -> None:
    n, width = 1 << 21, 1 << 20
    states = {"dtype": "BF16", "shape": [n, 1, width], "data_offsets": [0, 2 * n * width]}
    ids = {"dtype": "I64", "shape": [n], "data_offsets": [2 * n * width, 2 * n * width + 8 * n]}
    header = json.dumps({"hidden_states": states, "token_ids": ids}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 2 * n * width + 8 * n)
    with pytest.raises(FormatError, match=r"expected ranges that fit this machine's memory"):
        load_hidden_states(str(path))


def test_a_big_endian_machine_is_refused() -> None:
    code = "import sys; sys.byteorder = 'big'; import hsx_dist"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "expected a little-endian machine" in done.stderr


def test_meta_is_no_member_that_segments_share() -> None:
    """Each segment would have it: 300 KB of text took 2.3 GiB and 44 s."""
    items = [{"key": f"k{i}"} for i in range(2)]
    body = {"codec": {"name": "none"}, "about": {}, "schema": "segments", "common": {"meta": {"m": [0]}}}
    with pytest.raises(FormatError, match="common: expected members that segments share, got meta"):
        Description.from_json(json.dumps(body | {"segments": items}))
