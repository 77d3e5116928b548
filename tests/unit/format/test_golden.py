"""Parts that were stored once: every later version must read them bit for bit, and so must the page's reader."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import safetensors

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import CODECS
from hsx_dist.format.codecs.values import from_float32, to_float32
from hsx_dist.format.container import Part
from hsx_dist.page import FLOATS, HIDDEN_STATES
from hsx_dist.testing.stores import MemoryStore
from tests.golden.make import ABOUT, FOLDER, LAYERS, content, facts, parts, sample

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
FILES = sorted(EXPECTED["parts"])
PAGE = (FOLDER.parents[1] / "docs" / "format.md").read_text()

_OF_POINTS = ("point", "column", "columns", "shard", "shards", "head")

every_file = pytest.mark.parametrize("name", FILES)


def opened(name: str) -> Part:
    store = MemoryStore()
    store.objects[name] = (FOLDER / name).read_bytes()
    return Part.open(store, name)


def test_golden_files_cover_every_codec_and_dtype() -> None:
    assert {f.name for f in FOLDER.glob("*.safetensors")} == set(FILES)
    assert {f"{codec}-{dtype}.safetensors" for codec in CODECS for dtype in FLOATS} <= set(FILES)


@every_file
def test_golden_files_are_read_bit_for_bit(name: str) -> None:
    assert facts((FOLDER / name).read_bytes()) == EXPECTED["parts"][name]
    assert opened(name).about == ABOUT


@every_file
def test_golden_files_give_the_states_they_were_made_from(name: str) -> None:
    part = opened(name)
    for i, info in enumerate(part.segments):
        s = info.segment
        if s.point != HIDDEN_STATES:
            continue
        seed = {"a": 1, "conversation/é-2": 2, "c": 3, "one": 5 if "attached" in name else 4}[s.key]
        made = sample(s.key, s.total, info.dtype, seed)
        states, ids, _ = part.load(i)
        expected = made.states[s.start : s.stop, : info.num_layers]
        assert np.array_equal(ids, made.token_ids[s.start : s.stop])
        if part.codec.lossy:
            assert 0 < max(x.worst_token for x in part.loss(i).values()) < 0.04
            a, b = to_float32(states, info.dtype), to_float32(expected, info.dtype)
            assert np.allclose(a, b, rtol=2.0**-4, atol=np.abs(b).max() / 448 * 2.0**-9)
        else:
            assert np.array_equal(states, expected)
        assert info.layer_ids == (LAYERS if info.num_layers == 3 else (7,))
        attached = part.attached(i)
        if "loss_mask" in attached and s.total == 20:
            assert attached["loss_mask"].tolist() == [t % 3 == 0 for t in range(20)]
            assert attached["label"].shape == ()
            assert attached["label"] == 0.5
            assert attached["weights"].dtype == np.float32


@every_file
def test_the_safetensors_library_opens_golden_files(name: str) -> None:
    with safetensors.safe_open(FOLDER / name, "pt") as f:
        tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    assert len(tensors) >= 2
    if name.startswith("one-none-") and "attached" not in name:
        assert sorted(tensors) == ["hidden_states", "token_ids"]


@pytest.mark.parametrize("name", FILES)
def test_the_same_pages_make_the_same_bytes(name: str) -> None:
    made, again = (content(dict(parts())[name]) for _ in range(2))
    assert made == again
    # Another version of zstd may compress the same content to other bytes.
    if "none" in name:
        assert made == (FOLDER / name).read_bytes()


def reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # Blank lines, comments and the signature do not count. At most thirty lines of code do.
    assert len([line for line in code.splitlines() if line.strip()]) <= 33
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


@every_file
def test_the_pages_reader_reads_it(name: str) -> None:
    part = opened(name)
    found = list(reader()["read_part"](FOLDER / name))
    assert len(found) == len(part.segments)
    for i, (said, ids, values) in enumerate(found):
        info = part.segments[i]
        states, own_ids, _ = part.load(i)
        names = ("key", "start", "stop", *(_OF_POINTS if name.startswith("points") else ()))
        assert [said[n] for n in names] == [getattr(info.segment, n) for n in names]
        assert tuple(said["layer_ids"]) == info.layer_ids
        assert np.array_equal(ids, own_ids)
        if info.dtype == "int32":
            assert values.dtype == np.int32
            assert np.array_equal(values.view(np.uint32), states)
            continue
        assert (values.dtype, values.shape) == (np.float32, states.shape)
        carrier = np.empty_like(states)
        from_float32(np.ascontiguousarray(values), info.dtype, carrier)
        assert np.array_equal(carrier, states)


@every_file
def test_every_changed_byte_of_a_golden_file_is_detected(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    expected = EXPECTED["parts"][name]["segments"]
    for at in range(0, len(data), 23):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        try:
            assert facts(bytes(bad))["segments"] == expected
        except FormatError:
            continue
        raise AssertionError(f"expected an error after a change of byte {at}, got none")


def test_the_page_names_every_codec_and_the_version() -> None:
    assert all(f"`{name}`" in PAGE for name in CODECS)
    assert "`hsx/1`" in PAGE
    assert "`hsx/2`" in PAGE


@pytest.mark.parametrize("codec", CODECS)
def test_shards_of_a_point_and_ids_are_stored(codec: str) -> None:
    part = opened(f"points-{codec}.safetensors")
    assert [(s.segment.point, s.segment.column, s.segment.shard, s.dtype) for s in part.segments] == [
        ("q", 1, 1, "bfloat16"),
        ("hidden_states", 0, 0, "float16"),
        ("hidden_states", 0, 0, "bfloat16"),
        ("q", 2, 0, "bfloat16"),
        ("topk_ids", 3, 0, "int32"),
    ]
    ids = part.read(4)
    assert np.array_equal(ids, sample("a", 11, "bfloat16", 6).states[:, :2, :2] % 128)  # exact, also with a lossy codec
    assert not part.loss(4)
    if not CODECS[codec].lossy:
        assert np.array_equal(part.read(0), sample("a", 11, "bfloat16", 7).states)
        assert np.array_equal(part.read(3), sample("a", 11, "bfloat16", 6).states)
