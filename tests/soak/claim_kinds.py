"""Small objects with large claims, by kind, and all commands and readers of them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from hsx_dist.cli.inspect import print_run, print_samples
from hsx_dist.config import InputConfig
from hsx_dist.errors import HsxError
from hsx_dist.exporting.base import num_layers_of
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.names import receipt_name
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.inputs.rows import read_rows
from hsx_dist.jobs.input_identity import count_rows
from hsx_dist.observe.report.facts import gather_facts
from hsx_dist.observe.top import look
from hsx_dist.page import HIDDEN_STATES, token_hash
from hsx_dist.reading import load_hidden_states, open_run
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.expiry import expired
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.garbage import unproven
from hsx_dist.reading.map_dataset import HiddenStatesMapDataset
from hsx_dist.reading.retention import Retention, used_by_all
from hsx_dist.reading.statistics import compute_statistics
from hsx_dist.reading.status import run_status
from hsx_dist.reading.token_batches import TokenBatches
from hsx_dist.reading.verify import verify_run
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness import runs as testing_runs
from tests.soak.claim_commands import run_command
from tests.soak.mutations import VALUES, spots

#: Objects of version 1, whose names are known in advance.
store_run = partial(testing_runs.store_run, version=1)

ROWS_READ = 3000
#: Bytes of a compacted manifest. The tests need claims beyond the stored bytes, not large objects.
LARGEST_OBJECT = 16 << 20

Read = Callable[[], object]


def run_at(folder: Path, *, complete: bool = True) -> LocalStore:
    """A small run with a heartbeat, as a driver stores it."""
    store = LocalStore(folder)
    sample = random_sample("a", 20, layer_ids=(2, 5), hidden_size=16, chunk_tokens=8)
    info = {"first_rows": {"a": "00"}, "created": "2026-01-01T00:00:00+00:00", "id": "x"}
    store_run(store, [sample], info=info)
    if not complete:
        store.delete("attempts/0001.complete.json")
    progress = {"rows": 3, "seconds": 2.0, "fates": {"stored": 1}, "counted": {"engine_seconds": 1.0}, "paused": ""}
    beat = {"attempt": 1, "value": 3, "state": "running", "time": "2026-01-01T00:00:00+00:00", "progress": progress}
    store.put("attempts/0001.heartbeat.json", [json.dumps(beat).encode()])
    return store


def readers_of(store: LocalStore) -> list[Read]:
    """Calls of the commands and readers of a run."""
    return [
        lambda: run_status(store, observe_seconds=0, sleep=lambda _: None),
        lambda: look(store).line(),
        lambda: print_samples(store.url, (), limit=5, as_json=False),
        lambda: print_samples(store.url, (), limit=5, as_json=True),
        lambda: print_run(store.url, (), as_json=False),
        lambda: print_run(store.url, (), as_json=True),
        lambda: verify_run(store, workers=1),
        lambda: gather_facts(open_run(store.url)),
        lambda: unproven(open_place(store), seal=False),
        lambda: list(islice(Follower(open_place(store), sleep=lambda _: None, stalled_seconds=0), 5)),
        lambda: [s.load(framework="numpy") for s in open_run(store.url)],
        lambda: num_layers_of_any(store),
        lambda: retain(store),
        lambda: count_rows(open_run(store.url).place, lambda: iter(()), load_manifest(store)),
        lambda: resumed(store),
    ]


def num_layers_of_any(store: LocalStore) -> int:
    from hsx_dist.exporting.base import ExportOptions

    return num_layers_of(open_run(store.url), ExportOptions())


def retain(store: LocalStore) -> None:
    retention = Retention(open_place(store))
    for _ in range(2):
        retention._refresh()
    used_by_all(store.list("consumed/"), frozenset({"default"}))


def resumed(store: LocalStore) -> int:
    return take_attempt(store, {})


# -- names -----------------------------------------------------------------------------------------------------------


def _digits(rng: random.Random) -> str:
    number = 1 << rng.randrange(100)
    text = rng.choice([f"{number}", f"{number:06d}", f"{number:030d}", "9" * rng.randrange(4, 40)])
    return "".join(chr(0x0660 + int(c)) for c in text) if rng.random() < 0.2 else text


def names(rng: random.Random, folder: Path) -> list[Read]:
    store = run_at(folder, complete=rng.random() < 0.5)
    writer = rng.choice(["w", "é", "x" * 100, "w w", "%00"])
    for _ in range(rng.choice([1, 1, 3])):
        name = rng.choice(
            [
                f"manifest/{rng.choice(['0001', '0002', _digits(rng)])}/{writer}/{_digits(rng)}.json",
                f"attempts/{_digits(rng)}.json",
                f"attempts/{_digits(rng)}.heartbeat.json",
                f"consumed/part-0001-w-000001.safetensors/default.{_digits(rng)}of{_digits(rng)}.json",
                f"data/part-{_digits(rng)}-w-000001.safetensors",
            ]
        )
        store.put(name, [b"" if rng.random() < 0.5 else b"{}"])
    return readers_of(store)


# -- JSON objects ----------------------------------------------------------------------------------------------------

_OBJECTS = ("run.json", "attempts/0001.json", "attempts/0001.heartbeat.json", "attempts/0001.complete.json")


def _claims(value: Any, rng: random.Random) -> Any:
    """Replace some members of the value by other types or by large numbers."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = spots(value, [])
        if not places:
            break
        container, key = rng.choice(places)
        old = container[key]
        if type(old) is int and rng.random() < 0.5:
            container[key] = (old or 1) * (1 << rng.randrange(70)) * rng.choice([1, 1, -1])
        else:
            container[key] = rng.choice([*VALUES, 10**400, "9" * 50, [[]] * 3, {"a": {"b": 7}}])
    return value


def members(rng: random.Random, folder: Path) -> list[Read]:
    store = run_at(folder, complete=rng.random() < 0.5)
    name = rng.choice([n for n in _OBJECTS if (folder / n).exists()])
    found = _claims(testing_runs.unsealed((folder / name).read_bytes()), rng)
    store.put(name, [json.dumps(found).encode()])
    return readers_of(store)


def documents(rng: random.Random, folder: Path) -> list[Read]:
    """JSON that is huge, deep or full of empty lists, or bytes that are no JSON."""
    store = run_at(folder)
    deep = 1 << rng.randrange(18)
    lists = 1 << rng.randrange(20)
    body: bytes = rng.choice(
        [
            b"[" * deep,
            b'{"meaning":' * deep + b"{}" + b"}" * deep,
            b'{"meaning":{"model":' + b"[" * deep + b"]" * deep + b"}}",
            b'{"format":"hsx-run/1","settings":[' + b"[]," * lists + b"[]]}",
            b'{"format":"hsx-run/1","created":' + b"9" * deep + b"}",
            b'{"format":"hsx-run/1","format":"hsx-run/1"}',
            b'{"format":"hsx-run/1","created":"' + b"\\ud800" * 9 + b'"}',
            b"\xff\xfe",
        ]
    )
    name = rng.choice([*_OBJECTS, "check.json", "manifest/0001/w/000001.json", "manifest/0001/w/000002.json"])
    store.put(name, [body])
    if rng.random() < 0.3:
        os.truncate(folder / name, 1 << rng.randrange(12, 44))  # a sparse file: its size is a claim, too
    markers = ["m0.error.json", "m0.safetensors.conflict.json", "m1.failed.json"]
    for marker in markers:
        store.put(marker, [body])
        if rng.random() < 0.3:
            os.truncate(folder / marker, 1 << rng.randrange(12, 44))
    store.delete("run.json") if rng.random() < 0.3 else None
    return [
        *readers_of(store),
        lambda: list(expired(store)),
        lambda: load_hidden_states(str(folder / "m0.safetensors"), framework="numpy"),
    ]


# -- receipts and the compacted manifest -----------------------------------------------------------------------------


def sealed(body: Any) -> bytes:
    """A receipt with this body and its checksum."""
    text = (body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))).encode()
    return b'{"crc32c":"' + crc32c_hex(crc32c(text)).encode() + b'","receipt":' + text + b"}"


def receipts(rng: random.Random, folder: Path) -> list[Read]:
    store = run_at(folder, complete=False)
    path = folder / "manifest" / "0001" / "w" / "000001.json"
    body = json.loads(path.read_text())["receipt"]
    if rng.random() < 0.3:
        rows = [list(body["segments"][0]) for _ in range(rng.choice([2, 100]))]
        for slot, row in enumerate(rows):
            row[0], row[5] = f"k{slot}", slot
            row[7] = row[8] = 1 << rng.randrange(40, 63)
        body["segments"] = rows
    else:
        _claims(body, rng)
    store.put("manifest/0001/w/000001.json", [sealed(body)])
    if rng.random() < 0.2:  # receipts that are read at once, with a member that readers ignore
        unit = rng.choice(['{"":0}', "[]", '"\u0101"', "999", '{"a":{"b":1}}'])
        many = ",".join([unit] * ((1 << rng.choice([10, 16, 22])) // len(unit.encode())))
        for i in range(6):
            text = json.dumps({**body, "writer": f"z{i}"}, separators=(",", ":"))
            store.put(f"manifest/0001/z{i}/000001.json", [sealed(f'{text[:-1]},"x":[{many}]}}')])
            if rng.random() < 0.2:
                os.truncate(folder / f"manifest/0001/z{i}/000001.json", 99_999_999)
    return readers_of(store)


def compacted(rng: random.Random, folder: Path) -> list[Read]:
    store = run_at(folder)
    complete = testing_runs.unsealed((folder / "attempts/0001.complete.json").read_bytes())
    about = complete["manifest"]
    line = (folder / "manifest" / "0001" / "w" / "000001.json").read_bytes()
    size = 1 << rng.randrange(10, 31)
    filler: bytes = rng.choice([b"[],", b" ", b"0,", b'"ab",', line + b"\n"])
    window = rng.choice([10, 17, 23, 27])
    parameters = zstandard.ZstdCompressionParameters(compression_level=1, window_log=window)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    begin = rng.choice([b"", line[:-2] + b',"more":[', b'{"crc32c":"00000000","receipt":['])
    packed = [packer.compress(begin)]
    block = filler * ((1 << 16) // len(filler))
    blocks = length = 0
    while blocks < max(size >> 16, 1) and length < LARGEST_OBJECT:
        packed.append(packer.compress(block))
        length += len(packed[-1])
        blocks += 1
    packed.append(packer.flush())
    data = b"".join(packed)
    if rng.random() < 0.3:
        data = (folder / about["name"]).read_bytes()
    store.put(about["name"], [data])
    about |= {"size": len(data), "crc32c": crc32c_hex(crc32c(data))}
    about["raw_size"] = rng.choice([size, len(begin) + len(block) * blocks, 1 << rng.randrange(64)])
    about["receipts"] = rng.choice([1, 1 << rng.randrange(64)])
    store.put("attempts/0001.complete.json", [json.dumps(complete).encode()])
    return readers_of(store)


# -- headers ---------------------------------------------------------------------------------------------------------


def _part_readers(folder: Path) -> list[Read]:
    store = LocalStore(folder)
    path = str(folder / "p.safetensors")

    def everything() -> None:
        part = Part.open(store, "p.safetensors")
        for i in range(min(len(part.segments), 3)):
            part.load(i)
            part.attached(i)
            part.layer_bytes(i)
            for _ in islice(part.scan(i), 3):
                pass

    return [
        everything,
        lambda: load_hidden_states(path, framework="numpy"),
        lambda: load_hidden_states(path, framework="numpy", tokens=(0, 2)),
        lambda: list(expired(store)),
    ]


def plain_headers(rng: random.Random, folder: Path) -> list[Read]:
    """A file of vLLM's own connector with a shape of random size."""
    n, layers, hidden = (1 << rng.randrange(41) for _ in range(3))
    nbytes = n * layers * hidden * 2
    table = {
        "hidden_states": {"dtype": "BF16", "shape": [n, layers, hidden], "data_offsets": [0, nbytes]},
        "token_ids": {"dtype": "I64", "shape": [n], "data_offsets": [nbytes, nbytes + 8 * n]},
    }
    body = json.dumps(table).encode()
    (folder / "p.safetensors").write_bytes(struct.pack("<Q", len(body)) + body + bytes(rng.randrange(200)))
    if rng.random() < 0.5 and nbytes + 8 * n < 1 << 43:  # a hole of the claimed size, often many GiB
        os.truncate(folder / "p.safetensors", 8 + len(body) + nbytes + 8 * n)
    return _part_readers(folder)


def part_headers(rng: random.Random, folder: Path) -> list[Read]:
    """A part whose segments share layers and tables, or whose frames are bombs. All checksums are correct."""
    segments, layers = 1 << rng.randrange(12), 1 << rng.randrange(14)
    tokens, hidden = 1 << rng.randrange(8), 1 << rng.randrange(21)
    chunk = min(tokens, max(1, (256 << 20) // (hidden * 4)))
    frame = compress_huffman_zeros(chunk * hidden * 4)
    common: dict[str, Any] = {
        "index": 0,
        "start": 0,
        "stop": tokens,
        "total": tokens,
        "dtype": "float32",
        "hidden_size": hidden,
        "chunk_tokens": chunk,
        "token_crc": crc32c(bytes(8 * tokens)),
        "layer_ids": list(range(layers)),
    }
    chunks = -(-tokens // chunk)
    common["sizes"] = [[len(frame)] * chunks] * layers
    common["crcs"] = [[crc32c(frame)] * chunks] * layers
    items: list[dict[str, Any]] = [{"key": f"k{i}"} for i in range(segments)]
    if segments * layers * chunks < 4096 and rng.random() < 0.7:  # without sharing that no writer does
        items = [{"key": f"k{i}", "sizes": common["sizes"], "crcs": common["crcs"]} for i in range(segments)]
        del common["sizes"], common["crcs"]
    body = {"codec": {"name": "zstd", "level": 1}, "about": {}, "schema": "segments", "common": common}
    text = json.dumps(body | {"segments": items})
    data = b""
    try:
        description = Description.from_json(text)
        header = build_header(description)
        data = bytes(8 * tokens * segments) + frame * min(segments * layers * chunks, (1 << 22) // len(frame))
    except (HsxError, ValueError):
        entries = {"__metadata__": {"format": "hsx/1", "hsx": text, "hsx_crc32c": crc32c_hex(crc32c(text.encode()))}}
        raw = json.dumps(entries).encode()
        header = struct.pack("<Q", len(raw)) + raw
    (folder / "p.safetensors").write_bytes(header + data)
    return _part_readers(folder)


def compress_huffman_zeros(nbytes: int) -> bytes:
    """A zstd frame of ``nbytes`` zeros, made without holding them in memory."""
    parameters = zstandard.ZstdCompressionParameters(compression_level=1, write_content_size=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=nbytes)
    block, packed, left = bytes(1 << 20), [], nbytes
    while left:
        packed.append(packer.compress(block[:left]))
        left -= min(left, len(block))
    return b"".join([*packed, packer.flush()])


def many_segments(rng: random.Random, folder: Path) -> list[Read]:
    """A run whose receipts claim segments of a long sample that do not exist."""
    store = run_at(folder, complete=False)
    body = json.loads((folder / "manifest/0001/w/000001.json").read_text())["receipt"]
    n = 1 << rng.randrange(38)
    first, second = list(body["segments"][0]), list(body["segments"][0])
    first[1:6] = [0, 0, 20, 20 + n, 0]
    second[1:6] = [1, 20, 20 + n, 20 + n, 1]
    body["segments"] = [first, second]
    if rng.random() < 0.5:
        body["segments"] = _of_one_key(rng, first)
    body["size"] *= rng.choice([1, 1 << rng.randrange(20)])
    body["raw_bytes"] = 1 << 40
    store.put("manifest/0001/w/000001.json", [sealed(body)])
    return readers_of(store)


def _of_one_key(rng: random.Random, row: list[Any]) -> list[list[Any]]:
    """Many segments of one key: the same place, a chain, or other ends or tokens, of a known or an unknown sample."""
    n = 1 << rng.choice([3, 9, 14])
    indexes, starts, ends = (rng.choice([0, n]) for _ in range(3))
    tokens, samples = rng.choice([0, 1]), rng.choice([None, 0, 1])
    rows = []
    for i in rng.choice([range(n), range(n)[::-1]]):
        start = i * starts // n
        stop = start + 1 + i * ends // n
        sample = "" if samples is None else f"{i * samples:016x}"
        rows.append([row[0], i * indexes // n, start, stop, 1 << 40, len(rows), f"{i * tokens:016x}", 1, 1, 0, sample])
    return rows


def large_headers(rng: random.Random, folder: Path) -> list[Read]:
    """A run of many parts whose headers are proven and large: holes, blanks, or metadata that was written so."""
    store = LocalStore(folder)
    testing_runs.write_v1_run(store, {"meaning": {"layers": [3]}, "settings": {}, "id": "x"})
    writer, kind = testing_runs.RunWriter(store), rng.choice(["hole", "late hole", "blanks", "lists", "text"])
    length = 1 << rng.randrange(21, 25)
    count = (64 << 20) // length
    for i in range(count):
        receipt = writer.put([testing_runs.whole(random_sample(f"k{i}", 5, layer_ids=(3,), hidden_size=4), i)])
        assert receipt.part is not None
        path = folder / receipt.part
        header = _large_header(kind, length)
        with path.open("wb") as f:
            f.write(struct.pack("<Q", length) + header)
            f.truncate(8 + length + 1000)
        claims = replace(receipt, size=8 + length + 1000, header_bytes=8 + length)
        store.put(receipt_name(*receipt.id), [claims.to_json()])
    data = partial(HiddenStatesDataset, store.url, rank=0, world_size=1, framework="numpy")
    return [
        lambda: list(data(on_error="skip")),
        lambda: open_run(store.url).select(where=lambda meta: not meta),
        lambda: open_run(store.url).select(min_loss_tokens=1),
        lambda: verify_run(store, workers=4),
    ]


def _large_header(kind: str, length: int) -> bytes:
    begin = b'{"__metadata__":{'
    if kind in ("hole", "late hole"):
        return begin + b" " * (0 if kind == "hole" else min(1 << 17, length - len(begin)))
    if kind == "blanks":
        return begin + b" " * (length - len(begin))
    unit = b"[" if kind == "lists" else b"a"
    begin += b'"hsx":"'
    return begin + unit * (length - len(begin))


def columns(rng: random.Random, folder: Path) -> list[Read]:
    """A sample of many columns of zeros, each with the largest expansion of a part, or receipts with wrong columns."""
    store = LocalStore(folder)
    testing_runs.write_v1_run(store, {"meaning": {"layers": [3]}, "settings": {}, "id": "x"})
    # One in ten decodes to more than the remaining memory: smaller ones would not detect a missing check.
    small = rng.random() < 0.2
    shards, width = 1 << rng.randrange(0 if small else 4, 7), 1 << rng.randrange(0 if small else 13, 18)
    tokens = 1 << rng.randrange(6)
    zeros = np.zeros((tokens, 1, width), np.uint16)
    made = RandomSample("a", zeros, np.arange(tokens), (3,), "bfloat16", tokens)
    point = rng.choice([HIDDEN_STATES, "q"])
    facts = {"point": point, "shards": shards, "columns": shards, "sample_hash": token_hash(made.token_ids)}
    segments = [replace(made.segments()[0], **facts, shard=i, column=i) for i in range(shards)]
    testing_runs.RunWriter(store, resolve_codec("zstd")).put([(made, segment, 0) for segment in segments])
    if rng.random() < 0.5:
        path = folder / "manifest" / "0001" / "w" / "000001.json"
        store.put("manifest/0001/w/000001.json", [sealed(_claims(json.loads(path.read_text())["receipt"], rng))])
    data = partial(HiddenStatesDataset, store.url, points=[point], framework="numpy", threads=2)
    return [
        *readers_of(store),
        lambda: [s.load(points=[point], framework="numpy") for s in open_run(store.url)],
        lambda: [s.load_carrier(point=point) for s in open_run(store.url)],
        lambda: list(islice(TokenBatches(data(), 4), 3)),
        lambda: compute_statistics(open_run(store.url), point=point),
        partial(run_command, ["show", store.url, "a"]),
    ]


def chunks(rng: random.Random, folder: Path) -> list[Read]:
    """Samples of which a data set reads one token, each one chunk of zeros."""
    store = LocalStore(folder)
    width = 1 << rng.randrange(4, 20)
    tokens = 1 << rng.randrange(max(26 - width.bit_length(), 1))
    zeros = np.zeros((tokens, 1, width), np.uint16)
    made = [RandomSample(f"k{i}", zeros, np.arange(tokens), (3,), "bfloat16", tokens) for i in range(20)]
    store_run(store, made, per_part=rng.choice([1, 20]), codec=resolve_codec(rng.choice(["zstd", "split"])))
    crop = rng.choice(["start", "end", "random"])
    options: Any = {"max_tokens": rng.choice([1, tokens]), "crop": crop, "framework": "numpy"}
    data = partial(HiddenStatesDataset, store.url, prefetch_bytes=1 << rng.randrange(27), **options)
    return [
        lambda: [None for _ in data()],
        lambda: HiddenStatesMapDataset(store.url, **{**options, "max_tokens": 1}).__getitems__(range(20)),
        lambda: list(islice(data(follow=True, follow_options={"stalled_seconds": 0}), 2)),
        lambda: list(islice(TokenBatches(data(), 4), 3)),
    ]


# -- inputs ----------------------------------------------------------------------------------------------------------


def compressed_lines(rng: random.Random, folder: Path) -> list[Read]:
    size = 1 << rng.randrange(10, 30)
    unit: bytes = rng.choice(
        [b"x", b"\n", b"[],", b'{"a":[],"b":"', b'"ab",', '"ā",'.encode(), b"0,", b'{"text": "a"}\n']
    )
    begin: bytes = rng.choice(
        [b"", b'{"text": "', b'{"token_ids": [', b'{"messages": [', b'{"text": "\xf0\x9f\x98\x80']
    )
    ending = rng.choice([".gz", ".zst", ".xz", ".bz2"])
    path = folder / f"in.jsonl{ending}"
    block = unit * max((1 << 16) // len(unit), 1)
    import bz2

    def opened() -> Any:
        if ending == ".gz":
            return gzip.open(path, "wb", compresslevel=1)
        if ending == ".xz":
            return lzma.open(path, "wb", preset=rng.choice([0, 1]))
        if ending == ".bz2":
            return bz2.open(path, "wb", compresslevel=1)
        return zstandard.ZstdCompressor(level=1).stream_writer(path.open("wb"))

    with opened() as f:
        f.write(begin)
        for _ in range(min(max(size >> 16, 1), 1 << 13 if ending in (".zst", ".gz") else 1 << 10)):
            f.write(block)
    return [lambda: list(islice(read_rows(InputConfig(path=str(path))), ROWS_READ))]


def nothings(n: int, kind: str) -> Any:
    """A column of one row with ``n`` nulls, which are stored in no bytes. Some of its types are refused."""
    nulls = pa.nulls(n)
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(nulls, n)
    if kind == "list view":
        return pa.ListViewArray.from_arrays(pa.array([0], pa.int32()), pa.array([n], pa.int32()), nulls)
    lists = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), nulls)
    if kind == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), lists)
    return pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [lists])


def tables(rng: random.Random, folder: Path) -> list[Read]:
    """Arrow and Parquet files in which few bytes stand for many, and damaged files."""
    kind = rng.randrange(9)
    text = "x" * (1 << rng.randrange(24))
    rows = 1 << rng.randrange(12)
    if kind == 0:
        column: Any = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    elif kind == 1:
        n = 1 << rng.randrange(24)
        column = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.nulls(n))
    elif kind == 2:
        column = pa.array([[{"role": "user", "content": text[: 1 << 10]}]] * min(rows, 64))
    elif kind == 3:
        column = pa.array([[1] * (1 << rng.randrange(18))] * 4)
    elif kind == 4:
        column = nothings(1 << rng.randrange(28), rng.choice(["list view", "runs", "union", "fixed"]))
    elif kind == 5:
        unit = rng.choice(["[]", "{}", "0", '{"a":0}', '""'])
        column = pa.array(["[" + ",".join([unit] * ((1 << rng.randrange(25)) // len(unit))) + "]"])
    elif kind == 6:
        column = pa.array([text[: 1 << 16]] * min(rows, 64), pa.string_view())
    elif kind == 7:
        n = 1 << rng.randrange(23)
        type_ = rng.choice([pa.timestamp("us", "+01:00"), pa.timestamp("ns"), pa.duration("us"), pa.decimal128(38)])
        column = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(np.zeros(n, np.int64)).cast(type_))
    else:
        column = pa.array([text[: 1 << 16]] * min(rows, 64))
    name = rng.choice(["text", "messages", "token_ids"])
    ending = ".arrow" if kind in (4, 6) else rng.choice([".arrow", ".parquet"])  # Parquet lacks these types
    path = folder / f"in{ending}"
    compression = rng.choice(["zstd", None])
    if ending == ".arrow":
        options = pa.ipc.IpcWriteOptions(compression=compression)
        make = rng.choice([pa.ipc.new_file, pa.ipc.new_stream])
        with pa.OSFile(str(path), "wb") as f, make(f, pa.schema([(name, column.type)]), options=options) as w:
            w.write_batch(pa.record_batch([column], [name]))
    else:
        table = pa.table({name: column})
        pq.write_table(table, path, compression=compression or "none", dictionary_pagesize_limit=1 << 30)
    del column
    if rng.random() < 0.6:
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 2, 8])):
            at = rng.randrange(len(data)) if rng.random() < 0.5 else max(len(data) - 1 - rng.randrange(600), 0)
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
    return [lambda: list(islice(read_rows(InputConfig(path=str(path))), ROWS_READ))]


def arrow_claims(rng: random.Random, folder: Path) -> list[Read]:
    """Compressed Arrow files whose buffers claim any expanded length, in columns, dictionaries or other columns."""
    length = 8_068_407  # a number whose bytes occur in no other place of the file
    large: Any = pa.array(["\0" * length])
    if rng.random() < 0.5:
        large = large.dictionary_encode()
    columns = {"text": large} if rng.random() < 0.7 else {"text": pa.array(["a"]), "more": large}
    table = pa.table(columns)
    path = folder / "in.arrow"
    options = pa.ipc.IpcWriteOptions(compression=rng.choice(["zstd", "lz4"]))
    make = rng.choice([pa.ipc.new_file, pa.ipc.new_stream])
    with pa.OSFile(str(path), "wb") as f, make(f, table.schema, options=options) as w:
        w.write_table(table)
    claim = rng.choice([1, -1]) * (1 << rng.randrange(63))
    claimed = path.read_bytes().replace(struct.pack("<q", length), struct.pack("<q", claim))
    path.write_bytes(claimed)
    return [lambda: list(islice(read_rows(InputConfig(path=str(path))), ROWS_READ))]


KINDS: dict[str, Callable[[random.Random, Path], list[Read]]] = {
    "names": names,
    "members": members,
    "documents": documents,
    "receipts": receipts,
    "compacted manifests": compacted,
    "plain headers": plain_headers,
    "part headers": part_headers,
    "segments that are not there": many_segments,
    "large headers": large_headers,
    "columns": columns,
    "chunks": chunks,
    "compressed lines": compressed_lines,
    "tables": tables,
    "Arrow claims": arrow_claims,
}
