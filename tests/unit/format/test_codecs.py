from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import zstandard

from hsx_dist.errors import ConfigError, FormatError, UnknownCodec
from hsx_dist.format.codecs import CODECS, Codec, NoneCodec, SplitCodec, ZstdCodec, codec_from_dict, resolve_codec
from hsx_dist.page import CARRIER
from hsx_dist.testing.samples import random_sample

CODECS_TO_TEST = [NoneCodec(), ZstdCodec(), ZstdCodec(level=3), SplitCodec()]
SHAPES = [(1, 1), (1, 64), (2, 7), (37, 24), (910, 576)]

every_codec = pytest.mark.parametrize("codec", CODECS_TO_TEST, ids=str)
every_dtype = pytest.mark.parametrize("dtype", list(CARRIER))


def layer(n: int, hidden_size: int, dtype: str) -> np.ndarray[Any, Any]:
    return random_sample(tokens=n, hidden_size=hidden_size, layer_ids=(0,), dtype=dtype).states[:, 0]


@every_codec
@every_dtype
@pytest.mark.parametrize(("n", "hidden_size"), SHAPES)
def test_what_is_decoded_is_what_was_encoded(codec: Codec, dtype: str, n: int, hidden_size: int) -> None:
    x = layer(n, hidden_size, dtype)
    planes = codec.encode(x, dtype)
    assert len(planes) == len(codec.planes(dtype))
    for plane, data in zip(codec.planes(dtype), planes, strict=True):
        if plane.bytes_per_element is not None:
            assert memoryview(data).nbytes == n * hidden_size * plane.bytes_per_element
    y = codec.decode(planes, n, hidden_size, dtype)
    assert y.dtype == CARRIER[dtype]
    assert y.shape == (n, hidden_size)
    assert np.array_equal(x, y)


@every_codec
@every_dtype
def test_strided_rows_give_the_same_bytes(codec: Codec, dtype: str) -> None:
    x = random_sample(tokens=50, dtype=dtype).states
    for k in range(x.shape[1]):
        strided = codec.encode(x[:, k], dtype)
        packed = codec.encode(np.ascontiguousarray(x[:, k]), dtype)
        assert [bytes(memoryview(p)) for p in strided] == [bytes(memoryview(p)) for p in packed]


@every_codec
@every_dtype
def test_planes_do_not_share_memory_with_the_page(codec: Codec, dtype: str) -> None:
    x = layer(20, 24, dtype).copy()
    expected = x.copy()
    planes = codec.encode(x, dtype)
    x[:] = 0
    assert np.array_equal(codec.decode(planes, 20, 24, dtype), expected)


@every_codec
def test_two_threads_give_the_same_bytes(codec: Codec) -> None:
    xs = [random_sample(tokens=300, hidden_size=64, seed=s).states[:, 0] for s in range(8)]
    alone = [[bytes(memoryview(p)) for p in codec.encode(x, "bfloat16")] for x in xs]
    together: list[list[list[bytes]]] = [[], []]

    def work(out: list[list[bytes]]) -> None:
        out.extend([bytes(memoryview(p)) for p in codec.encode(x, "bfloat16")] for x in xs)

    threads = [threading.Thread(target=work, args=(out,)) for out in together]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == [alone, alone]


@every_codec
@every_dtype
def test_planes_of_a_wrong_size_are_refused(codec: Codec, dtype: str) -> None:
    planes = codec.encode(layer(10, 8, dtype), dtype)
    for n, hidden_size in ((9, 8), (11, 8), (10, 9), (1 << 40, 1 << 20)):
        with pytest.raises(FormatError):
            codec.decode(planes, n, hidden_size, dtype)
    for p in range(len(planes)):
        for bad in (b"", bytes(memoryview(planes[p]))[:-1], bytes(memoryview(planes[p])) + b"x", b"\xff" * 500):
            with pytest.raises(FormatError):
                codec.decode([*planes[:p], bad, *planes[p + 1 :]], 10, 8, dtype)


@pytest.mark.parametrize("codec", [ZstdCodec(), SplitCodec()], ids=str)
def test_a_bomb_is_refused_before_it_is_decompressed(codec: Codec) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    untold = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(80))
    lo = bytes(80)
    for frame in (bomb, untold):
        with pytest.raises(FormatError):
            codec.decode([frame, lo][: len(codec.planes("bfloat16"))], 10, 8, "bfloat16")


def test_split_stores_random_mantissas_raw_and_compresses_exponents() -> None:
    x = random_sample(tokens=1000, hidden_size=256, layer_ids=(0,)).states[:, 0]
    hi, lo = SplitCodec().encode(x, "bfloat16")
    assert memoryview(lo).nbytes == x.size
    assert np.array_equal(np.asarray(lo).reshape(x.shape), x & 0xFF)
    assert memoryview(hi).nbytes < 0.62 * x.size
    assert zstandard.ZstdDecompressor().decompress(hi) == (x >> 8).astype(np.uint8).tobytes()


def test_split_of_float32_is_top_byte_second_byte_low_half() -> None:
    x = random_sample(tokens=5, hidden_size=4, layer_ids=(0,), dtype="float32").states[:, 0]
    hi, mid, lo = SplitCodec().encode(x, "float32")
    assert zstandard.ZstdDecompressor().decompress(hi) == (x >> 24).astype(np.uint8).tobytes()
    assert bytes(memoryview(mid)) == ((x >> 16) & 0xFF).astype(np.uint8).tobytes()
    assert bytes(memoryview(lo)) == (x & 0xFFFF).astype("<u2").tobytes()


@every_codec
def test_a_codec_survives_its_dictionary(codec: Codec) -> None:
    assert codec_from_dict(codec.to_dict()) == codec
    assert resolve_codec(codec.to_dict()) == codec


def test_codecs_by_name() -> None:
    assert {name: resolve_codec(name).to_dict() for name in CODECS} == {
        "none": {"name": "none"},
        "split": {"name": "split"},
        "zstd": {"name": "zstd", "level": 1},
    }


def test_an_unknown_codec_in_an_object_is_named() -> None:
    for d in ({"name": "lz77"}, {"name": 3}, {}):
        with pytest.raises(UnknownCodec, match=repr(d.get("name"))):
            codec_from_dict(d)
    for d in ({"name": "zstd", "level": 99}, {"name": "zstd", "level": True}, {"name": "split", "planes": 3}):
        with pytest.raises(FormatError, match=str(d["name"])):
            codec_from_dict(d)


def test_a_wrong_setting_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'split'"):
        resolve_codec("splt")
    with pytest.raises(ConfigError, match="level"):
        resolve_codec({"name": "zstd", "level": 0})
