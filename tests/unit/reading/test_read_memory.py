"""What readers count before they read a sample is at least the memory that reading takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.format.codecs import Codec, NoneCodec, SplitCodec
from hsx_dist.format.container import Part, SegmentEncoder, build_part
from hsx_dist.format.segments import SegmentProof
from hsx_dist.reading import Run, kept_parts
from hsx_dist.reading.expiry import expired
from hsx_dist.reading.item_reader import ItemReader
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.kept_parts import KeptParts
from hsx_dist.reading.sample import Sample, load_bytes
from hsx_dist.serving.states_file import PIECE_BYTES, Range, StatesFile
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, write_v1_run
from tests.harness.traced_memory import trace_memory

#: Objects of Python, a codec's buffers, and messages.
SLACK = 1 << 18
LAYERS, TOKENS, HIDDEN = 8, 2048, 256


def arrays(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
    n = len(sample.token_ids)
    return {"loss_mask": np.ones(n, np.int64), "label": np.ones(1 << 18, np.int32), "other": np.ones(1 << 20, np.int32)}


def run_of(codec: Codec, per_part: int, chunk_tokens: int, *, hidden: int = HIDDEN, layers: int = LAYERS) -> Run:
    store = MemoryStore()  # copies fetched bytes
    made = [
        random_sample(f"s{i}", TOKENS, layer_ids=range(layers), hidden_size=hidden, seed=i, odd=False,
                      chunk_tokens=chunk_tokens)
        for i in range(2)
    ]  # fmt: skip
    store_run(store, made, per_part=per_part, codec=codec, attached=arrays)
    run = Run(store)
    _ = [sample.meta for sample in run]  # headers are read and kept
    return run


def taken(read: Any) -> int:
    """The most bytes that ``read`` allocates at once."""
    read()
    trace_memory()
    read()
    return tracemalloc.get_traced_memory()[1]


@pytest.mark.traced
@pytest.mark.parametrize("tokens", [None, (0, 1), (100, 1100)])
@pytest.mark.parametrize("layers", [None, [3], [5, 1, 2]])
@pytest.mark.parametrize("chunk_tokens", [64, 4096])
@pytest.mark.parametrize(("codec", "per_part", "schema"), [
    (NoneCodec(), 1, "vllm"), (NoneCodec(), 2, "segments"), (SplitCodec(), 1, "segments"),
])  # fmt: skip
def test_the_memory_of_a_read_is_counted(
    codec: Codec,
    per_part: int,
    schema: str,
    chunk_tokens: int,
    layers: list[int] | None,
    tokens: tuple[int, int] | None,
) -> None:
    run = run_of(codec, per_part, chunk_tokens)
    sample = run.at(0)
    assert run.open_part(sample._segments[0].part).description.schema == schema
    n, several = TOKENS if tokens is None else tokens[1] - tokens[0], LAYERS if layers is None else len(layers)
    states = n * several * HIDDEN * 2

    def read() -> Any:
        return sample.load(layers, tokens)

    assert taken(read) <= states + load_bytes(sample, layers, tokens, arrays=["loss_mask"]) + SLACK


@pytest.mark.traced
def test_one_segments_stored_states_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of a segment are next to its states, in the same answer of the store."""
    monkeypatch.setattr(
        "hsx_dist.reading.run.MOST_IDS", 0
    )  # of parts with few tokens, the ids are fetched with the header
    store = LocalStore(tmp_path)
    write_v1_run(store, {"meaning": {"layers": [1]}})
    writer, made = RunWriter(store, NoneCodec()), random_sample("a", 8000, layer_ids=[1], hidden_size=256)
    for segment in made.segments(*range(1000, 8000, 1000)):
        writer.put([(made, segment, 0)])
    sample = Run(store)["a"]
    assert taken(sample.load) <= 8000 * 256 * 2 + load_bytes(sample, None, None) + SLACK


@pytest.mark.traced
@pytest.mark.parametrize("spec", [
    ItemSpec(layers=[3], framework="torch"),
    ItemSpec(layers=[3], framework="torch", max_tokens=1),
    ItemSpec(layers=[3], framework="torch", max_tokens=1, loss_mask="off", rename={"label": "label"}),
    ItemSpec(layers=[3], framework="numpy"),
])  # fmt: skip
@pytest.mark.parametrize("hidden", [HIDDEN, 1])
def test_the_memory_of_an_item_is_counted(spec: ItemSpec, hidden: int) -> None:
    """Rows of one element take less memory than the ids of their tokens."""
    reader = ItemReader(run_of(NoneCodec(), 1, 64, hidden=hidden), spec, None, None, 0)
    record = reader.selection.run_index[0]
    beyond = reader._read_bytes(reader.run.sample_of(record), 0) - reader._held_ahead(record)
    counted = reader.nbytes(0) + max(0, beyond)
    assert taken(lambda: reader.make(0, 0)) <= counted + SLACK


@pytest.mark.traced
def test_only_the_named_arrays_are_loaded() -> None:
    """``other`` has 4 MiB."""
    spec = ItemSpec(layers=[3], max_tokens=1, loss_mask="off", rename={"label": "label"})
    reader = ItemReader(run_of(SplitCodec(), 1, 64), spec, None, None, 0)
    assert taken(lambda: reader.make(0, 0)) < 4 << 20


@pytest.mark.traced
def test_an_answer_of_one_layer_reads_small_pieces_of_a_part_with_all_layers() -> None:
    sample = run_of(NoneCodec(), 1, 64, hidden=1024, layers=16).at(0)
    file = StatesFile(sample, Range(layers=(3,)))
    assert file.loading_bytes <= 4 * PIECE_BYTES
    body = b"".join(bytes(file.piece(i)) for i in range(len(file)))
    assert len(body) == file.size
    assert taken(lambda: file.piece(1)) <= file.loading_bytes


def test_kept_headers_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    store, opened = MemoryStore(), list[str]()
    samples = [random_sample(f"s{i}", 9, layer_ids=range(50), hidden_size=4) for i in range(40)]
    store_run(store, samples, per_part=10, codec=SplitCodec())
    names = sorted(name for name in store.objects if name.endswith(".safetensors"))

    def open_part(name: str) -> Part:
        opened.append(name)
        return Part.open(store, name)

    one = kept_parts.nbytes_of(Part.open(store, names[0]))
    for most, again in ((4 * one + one // 2, 0), (2 * one + one // 2, 2), (one // 2, 3)):
        monkeypatch.setattr(kept_parts, "_KEPT_BYTES", most)
        kept = KeptParts()
        for name in names:
            kept.get(name, open_part)
        opened.clear()
        for name in reversed(names):
            kept.get(name, open_part)
        assert len(opened) == again


def test_rows_that_alternate_among_many_parts_open_each_part_once() -> None:
    """In the order of the rows, the samples of many writers are in their parts in turn."""
    store, opened = MemoryStore(), list[str]()
    store_run(store, [random_sample(f"s{i}", 9) for i in range(100)], per_part=1, codec=SplitCodec())
    kept, names = KeptParts(), sorted(name for name in store.objects if name.endswith(".safetensors"))
    for name in 2 * names:
        kept.get(name, lambda name: opened.append(name) or Part.open(store, name))
    assert opened == names


@pytest.mark.traced
def test_a_kept_header_is_counted_with_its_memory() -> None:
    store = MemoryStore()
    store_run(
        store, [random_sample(f"s{i}", 1, layer_ids=[3], hidden_size=4) for i in range(3000)], per_part=3000,
        codec=SplitCodec(),
    )  # fmt: skip
    name = next(name for name in store.objects if name.endswith(".safetensors"))
    trace_memory()
    part = Part.open(store, name)
    held = tracemalloc.get_traced_memory()[0]
    assert 0.5 < held / (kept_parts.PARSED * part.header_bytes) < 1.1


@pytest.mark.traced
@pytest.mark.parametrize("name", ["bad", "expires"])
def test_metadata_of_one_segment_at_a_time_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded metadata of all segments takes up to 44 times the memory of its text."""
    store, sample = MemoryStore(), random_sample("a", 40, layer_ids=[1], hidden_size=1)
    value: Any = [[]] * 5_000
    encoded = []
    for segment in sample.segments(*range(1, 40)):
        encoder = SegmentEncoder(NoneCodec())
        for page in sample.pages(replace(segment, meta={name: {"zero_layers": value} if name == "bad" else value})):
            encoder.add(page)
        encoded.append(encoder.finish())
    store.put("a.safetensors", build_part(encoded, NoneCodec(), {}).buffers)
    part = Part.open(store, "a.safetensors")
    monkeypatch.setattr(Part, "open", lambda *_, **__: part)
    proofs = [SegmentProof(info.segment, i, "", 0, 0, None, "", part.name) for i, info in enumerate(part.segments)]
    opened = Sample("a", proofs, lambda _: part, store.url)
    one = taken(lambda: part.segments[0].segment.meta[name])
    both = {"bad": lambda: opened.meta, "expires": lambda: list(expired(store))}
    assert taken(both[name]) < 4 * one + SLACK
