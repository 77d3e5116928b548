from __future__ import annotations

import itertools
import json
import struct
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_numpy
from safetensors.torch import save

from hsx_dist.errors import ConfigError, FormatError, IntegrityError, NotFound, UnknownCodec
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.codecs import CODECS, Codec, Fp8TokenCodec, NoneCodec, SplitCodec, ZstdCodec
from hsx_dist.format.container import EncodedPart, EncodedSegment, Part, SegmentEncoder, build_part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.segment_info import SegmentInfo
from hsx_dist.page import FLOATS, Page, Segment
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.traced_memory import trace_memory
from tests.unit.growth import check_linear

ABOUT = {"model": "a/b", "revision": None, "norm": "pre", "vllm": "0.32.0", "temperature": 0.5}
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

LOSSLESS = sorted(name for name, codec in CODECS.items() if not codec.lossy)
every_codec = pytest.mark.parametrize("codec", [NoneCodec(), ZstdCodec(), SplitCodec()], ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", list(FLOATS))


def encode(codec: Codec, pages: Sequence[Page]) -> EncodedSegment:
    encoder = SegmentEncoder(codec)
    sizes = [encoder.add(page) for page in pages]
    assert encoder.complete
    segment = encoder.finish()
    assert segment.nbytes == sum(sizes)
    return segment


def part_of(codec: Codec, *samples: RandomSample) -> EncodedPart:
    return build_part([encode(codec, list(s.pages())) for s in samples], codec, ABOUT)


def content(part: EncodedPart) -> bytes:
    return b"".join(memoryview(b).cast("B") if memoryview(b).nbytes else b"" for b in part.buffers)


def stored(part: EncodedPart) -> MemoryStore:
    store = MemoryStore()
    store.put("p", part.buffers)
    return store


def read_back(data: bytes) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    store = MemoryStore()
    store.objects["p"] = data
    part = Part.open(store, "p", size=len(data))
    return [part.load(i)[:2] for i in range(len(part.segments))]


@pytest.mark.parametrize("alone", [True, False])
def test_the_largest_tensor_begins_where_a_disk_has_a_page(alone: bool) -> None:
    """Also behind token ids that do not fill a page. The objects can still be opened."""
    sample = random_sample("a", 191, layer_ids=range(5), hidden_size=2048, dtype="float16")
    encoder = SegmentEncoder(NoneCodec(), alone=alone)
    for page in sample.pages():
        encoder.add(page)
    part = build_part([encoder.finish()], NoneCodec(), ABOUT)
    data = content(part)
    largest = max(load_numpy(data).values(), key=lambda x: x.nbytes)
    assert data.index(largest.tobytes()) % 4096 == 0
    assert np.array_equal(Part.open(stored(part), "p", header_bytes=part.header_bytes).read(0), sample.states)


@every_codec
@every_dtype
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 50])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
def test_a_part_gives_back_every_sample(
    codec: Codec, dtype: str, tokens: int, order: Literal["LTH", "TLH"], tmp_path: Path
) -> None:
    samples = [random_sample("a/ü\n\U0001f600\ud800", tokens, dtype=dtype), random_sample("b", 3, dtype=dtype, seed=1)]
    segments = [encode(codec, list(s.pages(order=order, padding=5))) for s in samples]
    part = build_part(segments, codec, ABOUT)
    data = content(part)
    assert (part.size, part.crc32c, part.header_bytes) == (len(data), crc32c_hex(crc32c(data)), len(part.header))
    assert part.raw_bytes == sum(s.states.nbytes for s in samples)
    assert part.header_bytes % 8 == 0
    assert part.header_bytes <= 400 + sum(s.header_nbytes for s in segments)
    opened = Part.open(stored(part), "p", header_bytes=part.header_bytes, size=part.size)
    assert opened.about == ABOUT
    assert opened.codec == codec
    for i, sample in enumerate(samples):
        info = opened.segments[i]
        assert info.segment == sample.segments()[0]
        assert (info.layer_ids, info.dtype, info.hidden_size) == (sample.layer_ids, dtype, 24)
        assert np.array_equal(opened.read(i), sample.states)
        assert np.array_equal(opened.token_ids(i), sample.token_ids)
        assert opened.token_ids(i).dtype == np.int64
        scanned: list[list[Any]] = [[] for _ in info.layer_ids]
        for k, x in opened.scan(i):
            scanned[k].append(x)
        assert np.array_equal(np.stack([np.concatenate(c) for c in scanned], axis=1), sample.states)

    path = tmp_path / "p.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        assert f.metadata()["format"] == "hsx/1"
    assert sum(t.nbytes for t in tensors.values()) == len(data) - part.header_bytes
    assert torch.equal(tensors["0.token_ids"], torch.from_numpy(samples[0].token_ids))
    if codec.name == "none":
        assert tensors["0.1"].dtype == TORCH[dtype]
        bits = tensors["0.1"].contiguous().view(torch.uint8).numpy().tobytes()
        assert bits == samples[0].states[:, 1].tobytes()


@every_dtype
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_one_plain_sample_is_in_vllms_own_schema(dtype: str, tokens: int, tmp_path: Path) -> None:
    sample = random_sample(tokens=tokens, dtype=dtype)
    part = part_of(NoneCodec(), sample)
    path = tmp_path / "p.safetensors"
    path.write_bytes(content(part))
    with safetensors.safe_open(path, "pt") as f:
        assert sorted(f.keys()) == ["hidden_states", "token_ids"]
        states, ids = f.get_tensor("hidden_states"), f.get_tensor("token_ids")
    assert states.dtype == TORCH[dtype]
    assert states.shape == sample.states.shape
    assert states.contiguous().view(torch.uint8).numpy().tobytes() == sample.states.tobytes()
    assert torch.equal(ids, torch.from_numpy(sample.token_ids))
    opened = Part.open(stored(part), "p")
    assert opened.segments[0].layer_ids == sample.layer_ids
    assert np.array_equal(opened.read(0, layers=[30, 2], tokens=(0, 1)), sample.states[:1, [2, 0]])


@pytest.mark.parametrize("codec", [NoneCodec(), ZstdCodec()], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("whole", [True, False])
def test_stored_bytes_of_layers_are_those_of_their_chunks(codec: Codec, whole: bool) -> None:
    sample = random_sample()
    pieces = [encode(codec, list(sample.pages(s))) for s in sample.segments(20)]
    part = Part.open(stored(part_of(codec, sample) if whole else build_part(pieces, codec, ABOUT)), "p")
    for i, info in enumerate(part.segments):
        sums = {layer: sum(info.chunk_sizes(k)) for k, layer in enumerate(info.layer_ids)}
        assert part.layer_bytes(i) == sums


def test_a_large_number_of_layers_and_chunks_takes_no_time() -> None:
    """In schema ``vllm`` a header has chunk checksums once for all layers: a short header claims many of both."""

    def part(n: int) -> Callable[[], object]:
        layers = min(n, 1000)
        info = SegmentInfo(Segment("a", 0, 0, n, n), tuple(range(layers)), "bfloat16", 1, 1, layers)
        description = Description(NoneCodec(), {}, "vllm", (replace(info, crcs=((0,) * n,), token_crc=0),))
        head = build_header(description)
        store = MemoryStore()
        store.put("p", [head])
        opened = Part.open(store, "p", header_bytes=len(head), size=len(head) + description.data_bytes)
        return lambda: opened.layer_bytes(0)

    assert part(2)() == {0: 4, 1: 4}
    check_linear(part, 4000)


def test_a_piece_of_a_sample_is_not_in_vllms_schema() -> None:
    sample = random_sample()
    pieces = [encode(NoneCodec(), list(sample.pages(s))) for s in sample.segments(20)]
    for segment in pieces:
        part = build_part([segment], NoneCodec(), ABOUT)
        assert "hidden_states" not in load_numpy_names(content(part))
        (got, ids), *_ = read_back(content(part))
        s = segment.segment
        assert np.array_equal(got, sample.states[s.start : s.stop])
        assert np.array_equal(ids, sample.token_ids[s.start : s.stop])


def load_numpy_names(data: bytes) -> set[str]:
    (n,) = struct.unpack_from("<Q", data)
    return set(json.loads(data[8 : 8 + n]))


def test_a_file_that_vllm_wrote_is_read() -> None:
    states = torch.randn(2000, 3, 256).to(torch.bfloat16)
    ids = torch.arange(2000)
    for metadata in (None, {"format": "pt"}):
        store = MemoryStore()
        store.objects["x"] = save({"hidden_states": states, "token_ids": ids}, metadata)
        part = Part.open(store, "x")
        info = part.segments[0]
        assert (info.layer_ids, info.dtype, info.num_layers) == ((), "bfloat16", 3)
        bits = states.view(torch.uint16).numpy()
        assert np.array_equal(part.read(0), bits)
        assert np.array_equal(part.read(0, tokens=(1500, 1900)), bits[1500:1900])
        assert np.array_equal(part.token_ids(0), ids.numpy())
        with pytest.raises(ConfigError, match="layers"):
            part.read(0, layers=[0])


def test_a_safetensors_file_of_another_program_is_refused() -> None:
    store = MemoryStore()
    store.objects["x"] = save({"lm_head.weight": torch.zeros(3)})
    with pytest.raises(FormatError, match=r"test://memory/x.*lm_head"):
        Part.open(store, "x")


def test_segments_with_other_layers_and_sizes_share_a_part() -> None:
    samples = [
        random_sample("a", 20, layer_ids=(1,), hidden_size=7),
        random_sample("b", 3, layer_ids=(5, 2, 9), hidden_size=16, chunk_tokens=1),
        random_sample("c", 9, dtype="float16"),
    ]
    for codec in (NoneCodec(), ZstdCodec(), SplitCodec()):
        data = content(part_of(codec, *samples))
        load_numpy(data) if codec.name != "none" else None
        for sample, (states, ids) in zip(samples, read_back(data), strict=True):
            assert np.array_equal(states, sample.states)
            assert np.array_equal(ids, sample.token_ids)


@every_codec
def test_the_same_pages_in_any_order_and_layout_give_the_same_bytes(codec: Codec) -> None:
    sample = random_sample(tokens=50)
    expected = content(part_of(codec, sample, random_sample("b")))
    other = encode(codec, list(sample.pages(order="TLH", padding=3))[::-1])
    about = dict(reversed(ABOUT.items()))
    assert content(build_part([other, encode(codec, list(random_sample("b").pages()))], codec, about)) == expected


@every_codec
def test_pages_may_be_added_by_several_threads(codec: Codec) -> None:
    sample = random_sample(tokens=999, hidden_size=64)
    encoder, pages = SegmentEncoder(codec), list(sample.pages())
    threads = [threading.Thread(target=lambda i=i: [encoder.add(p) for p in pages[i::4]]) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = part_of(codec, sample)
    assert content(build_part([encoder.finish()], codec, ABOUT)) == content(expected)


# -- input that a writer must refuse ---------------------------------------------------------------------------------


def changed(page: Page, **changes: Any) -> Page:
    return Page(**{f: changes.get(f, getattr(page, f)) for f in Page.__dataclass_fields__})


def test_missing_and_double_pages_are_refused() -> None:
    encoder = SegmentEncoder(SplitCodec())
    with pytest.raises(ValueError, match="got none"):
        encoder.finish()
    pages = list(random_sample(tokens=40).pages())
    encoder.add(pages[2])
    assert not encoder.complete
    with pytest.raises(ValueError, match="got page 2 twice"):
        encoder.add(pages[2])
    with pytest.raises(ValueError, match=r"expected 3 pages, got 2 fewer: \[0, 1\] are missing"):
        encoder.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": Segment("b", 0, 0, 37, 37)},
        {"segment": Segment("a", 1, 0, 37, 37)},
        {"layer_ids": (2, 15, 31)},
        {"dtype": "float16"},
        {"shape": (3, 16, 23)},
        {"chunk_tokens": 8},
        {"start": 17},
        {"stop": 31},
        {"start": 32, "stop": 38},
        {"start": -16, "stop": 0},
        {"token_ids": np.arange(15)},
        {"data": np.zeros((3, 15, 24), np.uint16)},
        {"data": np.zeros((2, 16, 24), np.uint16)},
        {"data": np.zeros((3, 16, 24), np.uint32)},
        {"data": np.zeros((3, 16 * 24), np.uint16)},
        {"order": "TLH"},
    ],
    ids=str,
)
def test_a_page_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    first, second, _ = random_sample().pages()
    encoder = SegmentEncoder(SplitCodec())
    encoder.add(first)
    with pytest.raises(ValueError, match="'a'"):
        encoder.add(changed(second, **changes))
    encoder.add(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": Segment("a", 0, 5, 5, 37)},
        {"segment": Segment("a", 0, 0, 37, 36)},
        {"layer_ids": ()},
        {"layer_ids": (2, 2, 30)},
        {"dtype": "int8"},
        {"chunk_tokens": 0},
    ],
    ids=str,
)
def test_a_first_page_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    page = next(random_sample().pages())
    with pytest.raises(ValueError, match="expected"):
        SegmentEncoder(SplitCodec()).add(changed(page, **changes))


def test_parts_that_make_no_sense_are_refused() -> None:
    segment = encode(SplitCodec(), list(random_sample().pages()))
    with pytest.raises(ValueError, match="at least one"):
        build_part([], SplitCodec(), {})
    with pytest.raises(ValueError, match="twice"):
        build_part([segment, segment], SplitCodec(), {})
    for codec in (ZstdCodec(), NoneCodec()):
        with pytest.raises(ValueError, match="SplitCodec"):
            build_part([segment], codec, {})
    with pytest.raises(ValueError, match="JSON"):
        build_part([segment], SplitCodec(), {"loss": float("nan")})


# -- ranges ----------------------------------------------------------------------------------------------------------


@every_codec
def test_only_the_chunks_needed_are_fetched(codec: Codec) -> None:
    # Chunks far larger than the gap that the store coalesces over.
    samples = [
        random_sample(f"s{i}", 4000, layer_ids=range(4), hidden_size=128, chunk_tokens=1000, seed=i) for i in range(3)
    ]
    encoded = part_of(codec, *samples)
    store = stored(encoded)
    part = Part.open(store, "p", header_bytes=encoded.header_bytes, size=encoded.size)
    assert (store.requests, store.bytes_read) == (1, encoded.header_bytes)

    table = part._tensors
    store.reset()
    assert np.array_equal(part.read(1, layers=[2]), samples[1].states[:, [2]])
    layer = sum(e - b for name, (_, _, (b, e)) in table.items() if name.startswith("1.2"))
    assert (store.requests, store.bytes_read) == (1, layer)
    whole = sum(e - b for name, (_, _, (b, e)) in table.items() if name.startswith("1.") and "token" not in name)
    assert layer <= whole * (1 / 4 + 0.05)

    store.reset()
    assert np.array_equal(part.read(1, layers=[2], tokens=(1100, 1900)), samples[1].states[1100:1900, [2]])
    assert layer * 0.24 <= store.bytes_read <= layer * 0.26

    store.reset()
    assert np.array_equal(part.read(1, layers=[3, 0], tokens=(1999, 2001)), samples[1].states[1999:2001][:, [3, 0]])
    assert layer * 0.98 <= store.bytes_read <= layer * 1.02

    store.reset()
    assert np.array_equal(part.token_ids(2), samples[2].token_ids)
    assert store.bytes_read == 8 * 4000

    store.reset()
    assert part.read(0, tokens=(7, 7)).shape == (0, 4, 128)
    assert part.read(0, layers=[]).shape == (4000, 0, 128)
    assert store.bytes_read == 0


def test_checking_every_chunk_takes_time_in_proportion_to_the_chunks() -> None:
    def make(chunks: int) -> Callable[[], object]:
        samples = [random_sample(k, chunks, layer_ids=(2,), hidden_size=1, chunk_tokens=1, odd=False) for k in "ab"]
        part = Part.open(stored(part_of(NoneCodec(), *samples)), "p")

        def scan() -> None:
            found = [x for _, x in part.scan(1)]
            assert np.array_equal(np.stack(found), samples[1].states)

        return scan

    check_linear(make, 400)


@pytest.mark.parametrize("codec", [NoneCodec(), ZstdCodec()])
def test_finding_a_chunk_takes_the_same_time_for_each(codec: Codec) -> None:
    def make(chunks: int) -> Callable[[], object]:
        sizes, crcs = () if codec == NoneCodec() else ((1,) * chunks,), ((0,) * chunks,)
        info = SegmentInfo(Segment("a", 0, 0, chunks, chunks), (2,), "bfloat16", 1, 1, 1, sizes, crcs, 0)
        description = Description(codec, {}, "segments", (info,))
        head, store = build_header(description), MemoryStore()
        store.put("p", [head])
        part = Part.open(store, "p", header_bytes=len(head), size=len(head) + description.data_bytes)
        size = sizes[0][0] if sizes else 2

        def find() -> None:
            assert all(part.fetch_bytes(0, None, (c, c + 1)) == size for c in range(chunks))

        return find

    check_linear(make, 3000)


@pytest.mark.slow
def test_a_header_of_thousands_of_segments_takes_one_or_two_requests() -> None:
    samples = [random_sample(f"conversation-{i:07}", 2, hidden_size=8, seed=i) for i in range(2000)]
    encoded = part_of(SplitCodec(), *samples)
    assert encoded.header_bytes > 256 * 1024
    store = stored(encoded)
    part = Part.open(store, "p", header_bytes=encoded.header_bytes, size=encoded.size)
    assert store.requests == 1
    store.reset()
    Part.open(store, "p", size=encoded.size)
    assert store.requests == 2
    store.reset()
    part = Part.open(store, "p")
    # Without a size it requests the size. The length field is fetched again with the header, and compared.
    assert (store.requests, store.bytes_read) == (3, 8 + encoded.header_bytes)
    assert np.array_equal(part.read(1999), samples[1999].states)


def test_wrong_layers_and_token_ranges_are_refused() -> None:
    part = Part.open(stored(part_of(SplitCodec(), random_sample())), "p")
    with pytest.raises(ConfigError, match=r"expected layers among \[2, 15, 30\], got \[7\]"):
        part.read(0, layers=[2, 7])
    for tokens in ((-1, 3), (3, 2), (0, 38)):
        with pytest.raises(ConfigError, match=r"\[0, 37\)"):
            part.read(0, tokens=tokens)
    for strange in (15, "15"):
        with pytest.raises(ConfigError, match=r"layers: expected (a list of )?layer ids"):
            part.read(0, layers=strange)  # type: ignore[arg-type]
    for odd in ((0.5, 2), (1, 2, 3), 4, ("a", "b")):
        with pytest.raises(ConfigError, match="two whole numbers"):
            part.read(0, tokens=odd)  # type: ignore[arg-type]
    assert part.read(0, layers=(layer for layer in (15, 2)), tokens=np.array([1, 3])).shape[:2] == (2, 2)
    with pytest.raises(NotFound):
        Part.open(MemoryStore(), "p")


# -- broken objects --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_codec
@pytest.mark.parametrize("count", [1, 2])
def test_a_flipped_bit_anywhere_is_found(codec: Codec, count: int) -> None:
    samples = [random_sample(f"s{i}", 9, hidden_size=8, chunk_tokens=4, seed=i) for i in range(count)]
    part = part_of(codec, *samples)
    data = bytearray(content(part))
    header_bits = range(0, 8 * part.header_bytes, 1 if count == 1 else 5)
    data_bits = np.random.default_rng(0).integers(8 * part.header_bytes, 8 * len(data), 600)
    for bit in itertools.chain(header_bits, map(int, data_bits)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="test://memory/p"):
            read_back(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    for sample, (states, _) in zip(samples, read_back(bytes(data)), strict=True):
        assert np.array_equal(states, sample.states)


@every_codec
def test_a_truncation_anywhere_is_found(codec: Codec) -> None:
    part = part_of(codec, random_sample(tokens=5), random_sample("b", 3))
    data = content(part)
    for n in range(len(data)):
        with pytest.raises(FormatError):
            read_back(data[:n])
        store = MemoryStore()
        store.objects["p"] = data[:n]
        with pytest.raises(FormatError):  # the header's length is known, so the size is never requested
            list(map(Part.open(store, "p", header_bytes=part.header_bytes).load, range(2)))
    with pytest.raises(FormatError, match="data"):
        read_back(data + b"\0")


def forged(part: EncodedPart, change: Any, *, table: Any = None) -> bytes:
    """The part with another description and its correct crc, as an attacker would write it."""
    (n,) = struct.unpack_from("<Q", part.header)
    header = json.loads(part.header[8 : 8 + n])
    body = json.loads(header["__metadata__"]["hsx"])
    change(body)
    text = json.dumps(body)
    header["__metadata__"] |= {"hsx": text, "hsx_crc32c": crc32c_hex(crc32c(text.encode()))}
    if table:
        table(header)
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + content(part)[part.header_bytes :]


HUGE = 1 << 60


@every_codec
@pytest.mark.parametrize(
    ("where", "value"),
    [
        *itertools.product(
            [("segments", 0, "stop"), ("segments", 0, "total"), ("common", "hidden_size"), ("common", "chunk_tokens")],
            [HUGE, -1, 0, 1.5, "9", None, True, 10**30],
        ),
        (("segments", 0, "start"), 40),
        (("segments", 0, "start"), -5),
        (("segments", 0, "index"), HUGE),
        (("segments", 0, "key"), 7),
        (("segments", 0, "token_crc"), 1 << 32),
        (("segments", 0, "crcs"), []),
        (("segments", 0, "crcs"), [[1], [2], [3]]),
        (("segments", 0, "crcs"), [[1.0, 2, 3]] * 3),
        (("segments", 0, "crcs"), 5),
        (("segments",), []),
        (("segments",), {}),
        (("segments", 0), 3),
        (("common", "dtype"), "int8"),
        (("common", "layer_ids"), []),
        (("common", "layer_ids"), [2, 2, 3]),
        (("common", "layer_ids"), [-1, 2, 3]),
        (("common", "layer_ids"), list(range(5000))),
        (("common",), []),
        (("about",), None),
        (("schema",), "vllm"),
        (("schema",), "other"),
        (("codec",), "split"),
        (("codec",), {"name": "zstd", "level": "x"}),
    ],
    ids=str,
)
def test_wrong_descriptions_are_refused(codec: Codec, where: tuple[Any, ...], value: Any) -> None:
    part = part_of(codec, random_sample(), random_sample("b"))

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for step in where[:-1]:
            at = at[step]
        at[where[-1]] = value

    with pytest.raises(FormatError, match="test://memory/p"):
        read_back(forged(part, change))


def test_a_repeated_layer_is_shown() -> None:
    part = part_of(SplitCodec(), random_sample())
    with pytest.raises(FormatError, match=r"layer_ids: expected different ids, got \[2, 2, 3\]"):
        read_back(forged(part, lambda body: body["common"].update(layer_ids=[2, 2, 3])))


def test_wrong_sizes_are_refused() -> None:
    part = part_of(SplitCodec(), random_sample(), random_sample("b"))
    for value in (HUGE, -1, 0, 1.0):
        with pytest.raises(FormatError):
            read_back(forged(part, lambda body, v=value: body["segments"][0]["sizes"][1].__setitem__(0, v)))

    def swap(body: dict[str, Any]) -> None:  # the sum does not change
        sizes = body["segments"][0]["sizes"][0]
        sizes[0], sizes[1] = sizes[0] - 1, sizes[1] + 1

    with pytest.raises(IntegrityError, match=r"segment 0, layer 2, tokens \(0, 16\)"):
        read_back(forged(part, swap))


def test_an_unknown_codec_is_named() -> None:
    part = part_of(SplitCodec(), random_sample())
    with pytest.raises(UnknownCodec, match="'newer'"):
        read_back(forged(part, lambda body: body["codec"].update(name="newer")))


def test_another_format_version_is_refused() -> None:
    part = part_of(SplitCodec(), random_sample())
    with pytest.raises(FormatError, match="hsx/3"):
        read_back(forged(part, lambda _: None, table=lambda h: h["__metadata__"].update(format="hsx/3")))


@pytest.mark.parametrize(
    "table",
    [
        lambda h: h["0.token_ids"].update(shape=[HUGE]),
        lambda h: h["0.token_ids"].update(dtype="U64"),
        lambda h: h["0.0"].update(data_offsets=[0, HUGE]),
        lambda h: h["0.0"].update(data_offsets=[8, 4]),
        lambda h: h["0.0"].update(data_offsets=h["0.1"]["data_offsets"]),
        lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda h: h.pop("0.1"),
        lambda h: h.update(more=3),
    ],
)
def test_a_table_that_does_not_follow_is_refused(table: Any) -> None:
    part = part_of(SplitCodec(), random_sample())
    assert read_back(forged(part, lambda _: None))
    with pytest.raises(FormatError):
        read_back(forged(part, lambda _: None, table=table))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        struct.pack("<Q", 4000) + b"[" * 4000,
        struct.pack("<Q", 20) + b'{"a":1,"a":2}'.ljust(20),
        struct.pack("<Q", 20) + b'{"__metadata__":[3]}',
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="test://memory/p"):
        read_back(data)


# -- the property ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    codec=st.sampled_from(LOSSLESS),
    dtype=st.sampled_from(sorted(FLOATS)),
    tokens=st.integers(1, 70),
    layers=st.integers(1, 4),
    hidden_size=st.integers(1, 40),
    chunk_tokens=st.integers(1, 80),
    order=st.sampled_from(["LTH", "TLH"]),
    padding=st.integers(0, 3),
    key=st.text(min_size=1, max_size=30),
    data=st.data(),
)
def test_any_read_of_any_sample_equals_the_stored_states(
    codec: str,
    dtype: str,
    tokens: int,
    layers: int,
    hidden_size: int,
    chunk_tokens: int,
    order: Literal["LTH", "TLH"],
    padding: int,
    key: str,
    data: st.DataObject,
) -> None:
    ids = data.draw(st.lists(st.integers(0, 100), min_size=layers, max_size=layers, unique=True))
    sample = random_sample(key, tokens, layer_ids=ids, hidden_size=hidden_size, dtype=dtype, chunk_tokens=chunk_tokens)
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=3)) - {tokens})
    coder = CODECS[codec]()
    segments = [encode(coder, list(sample.pages(s, order=order, padding=padding))) for s in sample.segments(*cuts)]
    part = Part.open(stored(build_part(segments, coder, {})), "p")
    picked = data.draw(st.lists(st.sampled_from(ids), max_size=layers))
    for i, s in enumerate(sample.segments(*cuts)):
        assert part.segments[i].segment == s
        start = data.draw(st.integers(0, s.num_tokens))
        stop = data.draw(st.integers(start, s.num_tokens))
        got = part.read(i, layers=picked, tokens=(start, stop))
        expected = sample.states[s.start + start : s.start + stop][:, [ids.index(p) for p in picked]]
        assert np.array_equal(got, expected)
        assert np.array_equal(part.token_ids(i), sample.token_ids[s.start : s.stop])


# -- attached arrays, and recorded losses ------------------------------------------------------------------------------

ATTACHED = {
    "loss_mask": np.arange(37) % 2 == 0,
    "label": np.float64(0.25),
    "ids": np.arange(6, dtype=np.int64).reshape(2, 3),
    "half": np.ones(3, np.float16),
    "empty": np.empty((0, 4), np.float32),
    "big-endian": np.arange(3, dtype=">i4"),
}


@every_codec
def test_attached_arrays_are_read_back(codec: Codec, tmp_path: Path) -> None:
    samples = [random_sample("a"), random_sample("b", 5)]
    encoders = [SegmentEncoder(codec) for _ in samples]
    for encoder, sample in zip(encoders, samples, strict=True):
        for page in sample.pages():
            encoder.add(page)
    segments = [encoders[0].finish(ATTACHED), encoders[1].finish()]
    for several in (segments, segments[:1]):
        encoded = build_part(several, codec, ABOUT)
        assert encoded.header_bytes <= 400 + sum(s.header_nbytes for s in several)
        assert encoded.size - encoded.header_bytes == sum(s.nbytes for s in several)
        part = Part.open(stored(encoded), "p", size=encoded.size)
        got = part.attached(0)
        assert set(got) == set(ATTACHED)
        for name, value in ATTACHED.items():
            assert np.array_equal(got[name], value)
            assert got[name].shape == np.shape(value)
        assert got["big-endian"].dtype == np.dtype("<i4")
        assert np.array_equal(part.read(0), samples[0].states)
        path = tmp_path / "p.safetensors"
        path.write_bytes(content(encoded))
        with safetensors.safe_open(path, "pt") as f:
            prefix = "" if codec.name == "none" and len(several) == 1 else "0."
            assert torch.equal(f.get_tensor(f"{prefix}attached.ids"), torch.arange(6).reshape(2, 3))
            assert all(f.get_tensor(n).data_ptr() % f.get_tensor(n).element_size() == 0 for n in f.keys())  # noqa: SIM118
    assert Part.open(stored(build_part(segments[1:], codec, {})), "p").attached(0) == {}


@pytest.mark.parametrize(
    "attached",
    [
        {"a b": np.zeros(1)},
        {"": np.zeros(1)},
        {"x": np.array(["text"])},
        {"x": np.zeros(1, complex)},
        {"x": np.array([None])},
        {"x": np.zeros((1,) * 9)},
        {"x": np.zeros((64 << 20) + 1, np.uint8)},
        {"loss_mask": np.zeros(3, bool)},
        {"loss_mask": np.float64(1)},
        *({name: np.zeros(1)} for name in ("hidden_states", "token_ids", "layer_ids", "input_ids", "key", "meta")),
    ],
    ids=str,
)
def test_unsupported_attached_arrays_are_refused(attached: dict[str, np.ndarray[Any, Any]]) -> None:
    encoder = SegmentEncoder(NoneCodec())
    for page in random_sample().pages():
        encoder.add(page)
    with pytest.raises(ValueError, match="to attach"):
        encoder.finish(attached)
    encoder.finish()


def test_arrays_are_attached_to_the_first_segment() -> None:
    sample = random_sample()
    encoder = SegmentEncoder(NoneCodec())
    for page in sample.pages(sample.segments(20)[1]):
        encoder.add(page)
    with pytest.raises(ValueError, match="segment 0 alone"):
        encoder.finish({"label": np.zeros(1)})


@every_dtype
def test_a_lossy_part_stores_the_error_of_each_layer(dtype: str) -> None:
    codec = Fp8TokenCodec()
    sample = random_sample(tokens=50, hidden_size=64, dtype=dtype, odd=False)
    forwards, backwards = (encode(codec, list(sample.pages(order=o))[::d]) for o, d in (("LTH", 1), ("TLH", -1)))
    encoded = build_part([forwards], codec, ABOUT)
    assert content(encoded) == content(build_part([backwards], codec, ABOUT))
    part = Part.open(stored(encoded), "p")
    states = part.read(0)
    for k, layer in enumerate(sample.layer_ids):
        a, b = (torch.from_numpy(x[:, k].copy()).view(TORCH[dtype]).double() for x in (sample.states, states))
        error = (a - b).norm(dim=1) / a.norm(dim=1)
        assert part.loss(0)[layer].worst_token == pytest.approx(float(error.max()), rel=1e-3)
        assert part.loss(0)[layer].rms == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-3)
    assert 2 * encoded.size < encoded.raw_bytes * (1.3 if dtype != "float32" else 0.8)


def test_a_layer_of_many_costs_its_share_and_five_percent() -> None:
    """5 % of all fetched bytes, with the header."""
    sample = random_sample(tokens=4000, layer_ids=range(8), hidden_size=128, chunk_tokens=500)
    for codec in (NoneCodec(), ZstdCodec(), SplitCodec(), Fp8TokenCodec()):
        segments = [encode(codec, list(sample.pages(s))) for s in sample.segments(2000)]
        encoded = build_part(segments, codec, ABOUT)
        store = stored(encoded)
        part = Part.open(store, "p")
        for i in range(2):
            part.read(i, layers=[5])
        assert store.bytes_read <= encoded.size * (1 / 8 + 0.05)
        assert store.requests == 5  # size, length, header, and two layers


def test_parts_are_built_without_a_copy_of_the_states() -> None:
    segments = [encode(SplitCodec(), list(random_sample(f"{i}", 300, hidden_size=64).pages())) for i in range(3)]
    part = build_part(segments, SplitCodec(), ABOUT)
    own = {id(chunk) for s in segments for layer in s.chunks for chunk in layer}
    states = sum(memoryview(b).nbytes for b in part.buffers if id(b) in own)
    assert states == part.size - part.header_bytes - sum(s.token_ids.nbytes for s in segments)


@pytest.mark.traced
def test_the_metadata_of_all_samples_is_not_decoded_at_once() -> None:
    """Nested lists take 44 times the memory of their text, and a part has up to 32 MiB of text."""
    lists = ",".join(["[" * 60 + "]" * 60] * 100)
    segments = []
    for i in range(20):
        sample = random_sample(f"k{i}", 16)
        segment = replace(sample.segments()[0], metadata=f'{{"lists":[{lists}]}}')
        segments.append(encode(SplitCodec(), list(sample.pages(segment))))
    trace_memory()
    part = build_part(segments, SplitCodec(), {})
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 12 * 20 * len(lists)
    found = Part.open(stored(part), "p")
    assert [info.segment.meta for info in found.segments] == [{"metadata": {"lists": json.loads(f"[{lists}]")}}] * 20
