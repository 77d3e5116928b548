"""Descriptions are parsed one segment at a time, and metadata is kept as text."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format import description_text
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.codecs import SplitCodec
from hsx_dist.format.container import Part, SegmentEncoder, build_part
from hsx_dist.format.description_text import MOST_CONTAINERS, parse_description
from hsx_dist.format.header import parse_header
from hsx_dist.format.json_objects import check_containers
from hsx_dist.format.known_members import MOST_MEMBERS
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.traced_memory import trace_memory


def part_of(metadata: list[object]) -> MemoryStore:
    """A part with a sample for each value."""
    encoded = []
    for i, value in enumerate(metadata):
        sample = random_sample(f"k{i}", 4, hidden_size=8)
        (page,) = sample.pages(replace(sample.segments()[0], meta={"expires": 7, "metadata": {"x": value}}))
        encoder = SegmentEncoder(SplitCodec())
        encoder.add(page)
        encoded.append(encoder.finish())
    store = MemoryStore()
    store.put("p", build_part(encoded, SplitCodec(), {}).buffers)
    return store


def changed(store: MemoryStore, text: str) -> bytes:
    """The part's header with another description."""
    data = bytes(store.objects["p"])
    body = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    body["__metadata__"] |= {"hsx": text, "hsx_crc32c": crc32c_hex(crc32c(text.encode()))}
    return json.dumps(body).encode()


def described(store: MemoryStore) -> str:
    data = bytes(store.objects["p"])
    return json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])["__metadata__"]["hsx"]


@pytest.mark.traced
def test_decoded_metadata_of_all_segments_is_never_in_memory_at_once() -> None:
    value = json.loads(f"[{','.join(['[]'] * 5000)}]")
    store = part_of([value] * 40)
    header = struct.unpack_from("<Q", bytes(store.objects["p"]))[0]
    trace_memory()
    part = Part.open(store, "p")
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 8 * header
    meta = pickle.loads(pickle.dumps(part.segments[39].segment.meta))
    assert (list(meta), meta, meta.get("expires"), meta.get("bad")) == (
        ["expires", "metadata"],
        {"expires": 7, "metadata": {"x": value}},
        7,
        None,
    )


@pytest.mark.traced
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("key", "[" * 900 + "]" * 900, "a number or a string"),
        ("total", "[{}]", "a number or a string"),
        ("layer_ids", "[[]]", "a list"),
        ("crcs", f"[{','.join(['{}'] * 600)}]", "a list of a list"),
        ("loss", "[[[]]]", "a list of a list"),
        ("attached", '{"a":[[[]]]}', "an object of a list of a list"),
    ],
)
def test_the_first_segment_with_other_lists_or_objects_ends_the_parsing(name: str, value: str, expected: str) -> None:
    """Decoded segments are kept until all are parsed. Their lists would take 44 times the memory of their text."""
    segments = ",".join([f'{{"{name}":{value}}}'] * 1000)
    text = f'{{"common":{{}},"segments":[{segments}]}}'
    trace_memory()
    with pytest.raises(FormatError, match=f"segment 0: {name}: expected {expected}, got other lists or objects"):
        parse_description(text)
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 1 << 20


def test_a_segment_with_very_many_lists_is_refused() -> None:
    store = part_of([1])
    for place in ('"x":1', '"about":{'):
        many = f'"y":[{",".join(["[]"] * (MOST_CONTAINERS + 1))}]'
        text = described(store).replace(place, f"{place},{many}" if place.endswith("1") else f"{place}{many}")
        with pytest.raises(FormatError, match=f"expected at most {MOST_CONTAINERS} lists and objects, got more"):
            parse_header(changed(store, text), 100)


def test_an_object_with_very_many_members_is_refused() -> None:
    store = part_of([1])
    value = ",".join(f'"{i}":0' for i in range(MOST_CONTAINERS + 1))
    for place, more in (('"x":1', f',"y":{{{value}}}'), ('"meta":{', f"{value},"), ('"about":{', value)):
        text = described(store).replace(place, place + more)
        with pytest.raises(FormatError, match=f"expected at most {MOST_CONTAINERS} members of objects, got more"):
            parse_header(changed(store, text), 100)


def test_a_header_with_more_members_than_its_tensors_need_is_refused() -> None:
    many = ",".join(f'"{i}":0' for i in range(100_000))
    own = f'{{"__metadata__":{{"format":"hsx/1","hsx":"a","hsx_crc32c":"00000000"}},"x":{{{many}}}}}'
    names = ",".join(f'"{chr(256 + i)}\\"dtype":0' for i in range(1_500))
    for body in (f"{{{many}}}", own, own.replace('"a"', '"a\\\\"'), own.replace(many, names)):
        with pytest.raises(FormatError, match=r"header: expected at most \d+ members of objects, got more"):
            parse_header(body.encode(), 0)


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
def test_a_table_of_very_many_tensors_has_few_members(separators: tuple[str, str]) -> None:
    entry = {"dtype": "U8", "shape": [], "data_offsets": [0, 0]}
    table = {str(i): entry for i in range(50_000)}
    for body in (table, {"__metadata__": {"format": "hsx/1", "hsx": "{:}" * 99, "hsx_crc32c": "0"}, **table}):
        with pytest.raises((FormatError, IntegrityError), match=r"expected a part of hsx_dist|expected crc32c"):
            parse_header(json.dumps(body, separators=separators).encode(), 0)


def test_a_header_with_more_lists_than_its_tensors_need_is_refused() -> None:
    many = ",".join(['{"":0}'] * 100_000)
    own = f'{{"__metadata__":{{"format":"hsx/1","hsx":"a","hsx_crc32c":"00000000"}},"x":[{many}]}}'
    after = '[{"hsx":"\\\\"},' + "[]," * 100_000 + '","hsx_crc32c":"'  # the description ends before the lists
    for body in (f'{{"x":[{many}]}}', own, own.replace('"a"', '"a\\\\"'), after):
        with pytest.raises(FormatError, match=r"header: expected at most \d+ lists and objects, got more"):
            parse_header(body.encode(), 0)


def test_brackets_and_colons_in_strings_are_not_counted() -> None:
    value = "[{" * MOST_CONTAINERS + '\\"' + '":' * MOST_CONTAINERS
    part = Part.open(part_of([value, 1]), "p")
    assert part.segments[0].segment.meta["metadata"] == {"x": value}


def test_brackets_are_counted_in_little_memory() -> None:
    """Other repetitions in a regular expression keep their places: 110 bytes for each backslash and its character."""
    # tracemalloc does not see memory that ``re`` allocates.
    code = (
        "import resource; from hsx_dist.format.json_objects import check_containers\n"
        "text = b'\"' + b'\\\\n' * (1 << 21) + b':' * 9 + b'[' * 9\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "check_containers(text, 8, 'x')\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32


def test_brackets_are_counted_in_linear_time() -> None:
    """A string without end has a quote at every second byte."""
    begin = time.process_time()
    check_containers(b'"' + b'\\"' * (1 << 20) + b"[:" * 9, 8, "x")
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "text",
    [
        '{"codec":1}',
        ' { "codec" : [ 1 , {} ] , "segments" : [ { "meta" : { "b" : [ ] } } , { } ] } ',
        "{}",
        '{"segments":[]}',
        '{"about":{"a":[]},"schema":"\\ud800"}',
        f'{{"segments":[{",".join(["{}"] * 60_000)}],"about":"{"x" * 70_000}"}}',
        f'{{"segments":[{{"crcs":[{",".join(["[4]"] * 9_000)}],"key":"{"x" * 9_000}","meta":{{"a":[{{}}]}}}}]}}',
    ],
)
def test_a_description_is_parsed_as_json(text: str) -> None:
    found = parse_description(text)
    for item in found.get("segments", ()):
        if "meta" in item:
            item["meta"] = dict(item["meta"])
    assert found == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["", "[", "[]", "1", "{", '{"a"}', '{"a":}', '{"a":1,}', '{"about":1,"about":2}', '{"segments":[1,]}',
     '{"segments":[}', '{"segments":[{} {}]}', '{"segments":[1]}', '{"segments":{}}', '{"a":NaN}', '{"a":1e999}',
     '{"a":1}x', "{1:2}", '{"a":' + "[" * 200_000, '{"a":"', '{"a":[', '{"a":["]}', '{"common":[]}'],
)  # fmt: skip
def test_other_texts_are_format_errors(text: str) -> None:
    with pytest.raises(FormatError):
        parse_description(text)


@pytest.mark.parametrize("value", ['"\\"[{"', '[["]"],{"a":"\\\\"}]', "{}", "-1.5e3", "null", f'["{"x" * 5_000}"]'])
def test_unknown_members_are_skipped(value: str) -> None:
    segment = f'{{"new" : {value} , "key":"k","newer":{value}}}'
    text = f'{{"new":{value},"common":{segment},"newer" : {value} ,"segments":[{segment},{segment}]}}'
    assert parse_description(text) == {"common": {"key": "k"}, "segments": [{"key": "k"}] * 2}


@pytest.mark.traced
@pytest.mark.parametrize("place", ['{{"new":{}}}', '{{"segments":[{{"new":{}}}]}}', '{{"common":{{"new":{}}}}}'])
def test_unknown_members_take_no_memory(place: str) -> None:
    """Decoded, they take up to 44 times the memory of their text."""
    numbers = ",".join(["300"] * 500_000)
    strings = '","' * 500_000
    text = place.format(f'[[{numbers}],["{strings}"]]')
    trace_memory()
    parse_description(text)
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 1 << 20


@pytest.mark.traced
def test_segments_beyond_the_number_of_tensors_are_not_parsed() -> None:
    """Parsed, a million empty segments take seconds and a hundred megabytes."""
    text = f'{{"codec":{{"name":"none"}},"schema":"segments","segments":[{",".join(["{}"] * 1_000_000)}]}}'
    trace_memory()
    with pytest.raises(FormatError, match="expected 4 tensors, as in the header"):
        parse_description(text, 4)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20


def test_a_description_has_a_bounded_number_of_members() -> None:
    members = [f'"{i}":0' for i in range(MOST_MEMBERS)]
    assert parse_description(f"{{{','.join(members)}}}") == {}
    members.append('"more":0')
    with pytest.raises(FormatError, match=f"at most {MOST_MEMBERS} members"):
        parse_description(f"{{{','.join(members)}}}")


@pytest.mark.parametrize("size", [1, 5_000, 70_000])
def test_a_segment_is_decoded_from_a_short_copy_or_in_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of some MiB may have a million segments of three characters."""
    copied = []
    decode = description_text._DECODE

    def counted(part: str, *at: int) -> tuple[Any, int]:
        copied.append(0 if at else len(part))
        return decode(part, *at)

    monkeypatch.setattr(description_text, "_DECODE", counted)
    segments = [{"key": "x" * size}] * 100
    assert parse_description(json.dumps({"segments": segments}))["segments"] == segments
    assert 0 < sum(copied) <= len(segments) * description_text._WINDOW


def test_a_description_that_is_not_ascii_is_refused() -> None:
    """Python takes four bytes for each character of a text with an emoji. Writers escape all such characters."""
    text = json.dumps({"about": "\U0001f600"}, ensure_ascii=False)
    metadata = {"format": "hsx/1", "hsx": text, "hsx_crc32c": crc32c_hex(crc32c(text.encode()))}
    with pytest.raises(FormatError, match="expected a description in ASCII"):
        parse_header(json.dumps({"__metadata__": metadata}).encode(), 0)
