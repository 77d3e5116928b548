from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import zstandard

from hsx_dist.config import ExtractConfig
from hsx_dist.config.checks import CODEC_NAMES
from hsx_dist.errors import ConfigError, FormatError, UnknownCodec
from hsx_dist.format.codecs import (
    CODECS,
    Codec,
    Fp8TokenCodec,
    NoneCodec,
    SplitCodec,
    ZstdCodec,
    _installed,
    codec_from_dict,
    register_codec,
    resolve_codec,
    zstd,
)
from hsx_dist.format.codecs.fp8_token import E4M3, encode_e4m3
from hsx_dist.format.codecs.values import from_float32, to_float32
from hsx_dist.format.loss import combine, measure
from hsx_dist.page import CARRIER, FLOATS
from hsx_dist.store.base import Buffer
from hsx_dist.testing.codec_suite import CodecSuite, decoded, encoded
from hsx_dist.testing.samples import random_sample

ROOT = Path(__file__).parents[3]


class TestNone(CodecSuite):
    compresses = False

    @pytest.fixture
    def codec(self) -> Codec:
        return NoneCodec()


class TestZstd(CodecSuite):
    @pytest.fixture(params=[1, 3])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return ZstdCodec(request.param)


class TestSplit(CodecSuite):
    @pytest.fixture
    def codec(self) -> Codec:
        return SplitCodec()


class TestFp8Token(CodecSuite):
    worst_token = 0.04

    @pytest.fixture
    def codec(self) -> Codec:
        return Fp8TokenCodec()


@dataclass(frozen=True)
class Inverted:
    """A third-party codec: every bit inverted, xor ``mask``."""

    name: ClassVar[str] = "inverted"
    lossy: ClassVar[bool] = False
    mask: int = 0

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:  # noqa: ARG002
        return (bytes(memoryview(np.ascontiguousarray(~x ^ x.dtype.type(self.mask))).cast("B")),)

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:  # noqa: ARG002
        if data.nbytes != out.nbytes:
            raise FormatError(f"expected {out.nbytes} bytes, got {data.nbytes}")
        out[:] = ~np.frombuffer(data, out.dtype).reshape(out.shape) ^ out.dtype.type(self.mask)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "mask": self.mask}


@pytest.fixture
def inverted() -> Iterator[Codec]:
    register_codec(Inverted)
    yield Inverted(7)
    del CODECS["inverted"]
    CODEC_NAMES.discard("inverted")


class TestRegistered(CodecSuite):
    compresses = False

    @pytest.fixture
    def codec(self, inverted: Codec) -> Codec:
        return inverted


def test_registering(inverted: Codec) -> None:
    assert register_codec(Inverted) is Inverted  # registering twice is allowed
    assert resolve_codec({"name": "inverted", "mask": 3}) == Inverted(3)
    assert ExtractConfig(output="x", model="m", codec="inverted").codec == "inverted"

    class Other(Inverted):
        pass

    with pytest.raises(ValueError, match=r"'inverted'.*got that of .*Inverted"):
        register_codec(Other)
    Other.name = "Not A Name"
    with pytest.raises(ConfigError, match="lower-case"):
        register_codec(Other)
    Other.name, Other.lossy = "other", "no"
    with pytest.raises(ConfigError, match="lossy to be True or False, got 'no'"):
        register_codec(Other)

    class Half:
        name = "half"

        def encode(self) -> None: ...

    with pytest.raises(ConfigError, match="Define decode, to_dict, lossy"):
        register_codec(Half)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="expected a class"):
        register_codec(Inverted(1))  # type: ignore[type-var]
    assert "half" not in CODECS
    assert "other" not in CODECS


def test_a_codec_whose_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("squeeze", "a_package_that_is_not_there:Squeeze", "hsx_dist.codecs")
    monkeypatch.setattr("hsx_dist.format.codecs._installed", lambda: {"squeeze": broken})
    with pytest.raises(UnknownCodec, match=r"point a_package_that_is_not_there:Squeeze.*ModuleNotFoundError"):
        codec_from_dict({"name": "squeeze"})
    with pytest.raises(ConfigError, match=r"codec: codec 'squeeze'.*ModuleNotFoundError"):
        resolve_codec("squeeze")


def test_the_codec_that_the_documentation_writes(tmp_path: Path) -> None:
    _, code, proof = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (tmp_path / "deflate.py").write_text(code)
    (tmp_path / "test_deflate.py").write_text(proof)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_deflate.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d passed", done.stdout)


def test_a_codec_of_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        name = "inverted"

        def load(self) -> type[Codec]:
            return Inverted

    asked: list[str] = []

    def entry_points(*, group: str) -> list[Found]:
        asked.append(group)
        return [Found()]

    monkeypatch.setattr("hsx_dist.format.codecs.entry_points", entry_points)
    _installed.cache_clear()
    try:
        assert codec_from_dict({"name": "inverted", "mask": 1}) == Inverted(1)
        with pytest.raises(UnknownCodec, match="'inverted2'"):
            codec_from_dict({"name": "inverted2"})
        assert asked == ["hsx_dist.codecs"]  # once: any number of objects may name unknown codecs
    finally:
        _installed.cache_clear()
        CODECS.pop("inverted")
        CODEC_NAMES.discard("inverted")


# -- zstd and split --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "raw"), [(ZstdCodec(), 0), (SplitCodec(), 80), (Fp8TokenCodec(), 40)], ids=str)
def test_a_bomb_is_refused_before_it_is_decompressed(codec: Codec, raw: int) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    untold = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(80))
    for frame in (bomb, untold):
        with pytest.raises(FormatError, match=r"with .* bytes of content, got"):
            decoded(codec, bytes(raw) + frame, (10, 8), "bfloat16")


@pytest.mark.parametrize("codec", [ZstdCodec(), SplitCodec(), Fp8TokenCodec()], ids=str)
def test_sizes_that_a_frame_cannot_hold_are_refused_before_allocating(codec: Codec) -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 20, 1 << 20), (0, 0))
    with pytest.raises(FormatError, match="expected"):
        codec.decode(memoryview(bytes(100)), out, "bfloat16")


def test_frames_with_a_checksum_are_read_and_checked() -> None:
    x = random_sample(tokens=30, layer_ids=(0,)).states[:, 0]
    frame = bytearray(zstandard.ZstdCompressor(level=3, write_checksum=True).compress(x.tobytes()))
    assert np.array_equal(decoded(ZstdCodec(), bytes(frame), x.shape, "bfloat16"), x)
    frame[-1] ^= 1
    with pytest.raises(FormatError, match=r"(?i)checksum"):
        decoded(ZstdCodec(), bytes(frame), x.shape, "bfloat16")


def test_frames_of_all_kinds_of_blocks_are_walked() -> None:
    rng = np.random.default_rng(0)
    noise, text = rng.integers(0, 65536, (200, 576), np.uint16), np.tile(np.arange(576, dtype=np.uint16), (200, 1))
    x = np.concatenate([noise, np.zeros_like(noise), text, noise])
    frame = encoded(ZstdCodec(), x, "bfloat16")
    assert np.array_equal(decoded(ZstdCodec(), frame, x.shape, "bfloat16"), x)
    for cut in itertools.chain(range(0, len(frame), 977), range(len(frame) - 50, len(frame))):
        with pytest.raises(FormatError):
            decoded(ZstdCodec(), frame[:cut], x.shape, "bfloat16")


def test_split_stores_random_mantissas_raw_and_compresses_exponents() -> None:
    x = random_sample(tokens=1000, hidden_size=256, layer_ids=(0,)).states[:, 0]
    stored = encoded(SplitCodec(), x, "bfloat16")
    low, frame = stored[: x.size], stored[x.size :]
    assert low == (x & 0xFF).astype(np.uint8).tobytes()
    assert len(frame) < 0.62 * x.size
    assert zstandard.ZstdDecompressor().decompress(frame) == (x >> 8).astype(np.uint8).tobytes()


def test_planes_are_coded_where_libzstd_refuses_the_experimental_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "_LITERAL_COMPRESSION_MODE", 99_999)
    monkeypatch.setattr(zstd, "_local", threading.local())  # no compressor exists yet
    x = random_sample(tokens=1000, hidden_size=256, layer_ids=(0,)).states[:, 0]
    frame = encoded(SplitCodec(), x, "bfloat16")
    assert len(frame) < 1.62 * x.size
    assert np.array_equal(decoded(SplitCodec(), frame, x.shape, "bfloat16"), x)


def test_split_of_float32_is_low_halves_third_bytes_high_bytes() -> None:
    x = random_sample(tokens=5, hidden_size=4, layer_ids=(0,), dtype="float32").states[:, 0]
    stored = encoded(SplitCodec(), x, "float32")
    low, third, frame = stored[: 2 * x.size], stored[2 * x.size : 3 * x.size], stored[3 * x.size :]
    assert zstandard.ZstdDecompressor().decompress(frame) == (x >> 24).astype(np.uint8).tobytes()
    assert third == ((x >> 16) & 0xFF).astype(np.uint8).tobytes()
    assert low == (x & 0xFFFF).astype("<u2").tobytes()


# -- fp8-token, proven against torch ---------------------------------------------------------------------------------


def test_every_fp8_code_decodes_as_in_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, theirs, equal_nan=True)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_of_a_float32_rounds_as_in_torch(low: int) -> None:
    """All 2**16 upper halves with these lower ones: every code, every tie and both its neighbours."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16 | low).view(np.float32)
    x = x[(np.abs(x) <= 448) | np.isnan(x)]
    theirs = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(encode_e4m3(x), theirs)


def test_values_beyond_e4m3_are_saturated_and_infinities_become_nan() -> None:
    x = np.array([449, 1e30, np.inf, -np.inf, -500], np.float32)
    assert encode_e4m3(x).tolist() == [0x7E, 0x7E, 0x7F, 0xFF, 0xFE]


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_float32_and_carriers_agree_with_torch(dtype: str) -> None:
    x = (np.arange(1 << 20, dtype=np.uint32) << 12 | 0x7FF).view(np.float32)
    x = np.concatenate([x, (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)])
    out = np.empty(x.shape, CARRIER[dtype])
    from_float32(x, dtype, out)
    theirs = torch.from_numpy(x).to(getattr(torch, dtype))
    ours = torch.from_numpy(out).view(getattr(torch, dtype))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert np.array_equal(to_float32(out, dtype), theirs.float().numpy(), equal_nan=True)


def test_a_token_is_scaled_alone_and_its_largest_value_kept() -> None:
    values = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    values[:, 3] = 2.0 ** np.arange(-25, 25)  # magnitudes from 3e-8 to 2e7 next to each other
    values[:, 5] = 1e4 * values[:, 3]
    x = np.empty(values.shape, np.uint16)
    from_float32(values, "bfloat16", x)
    y = decoded(Fp8TokenCodec(), encoded(Fp8TokenCodec(), x, "bfloat16"), x.shape, "bfloat16")
    before, after = to_float32(x, "bfloat16"), to_float32(y, "bfloat16")
    largest = np.abs(before).max(axis=1)
    assert np.array_equal(np.abs(after).max(axis=1), largest)
    # Half a unit in the last place of three bits, or half the smallest step, plus the carrier's rounding.
    limit = np.maximum(np.abs(before) * (2.0**-4 + 2.0**-8), largest[:, None] / 448 * 2.0**-10 * 1.01)
    assert (np.abs(after - before) <= limit).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_extreme_tokens_survive_fp8(dtype: str) -> None:
    top = np.float32(np.finfo(np.float32).max) if dtype == "float32" else np.float32(3.3895314e38)
    rows = [[0, 0, 0], [top, -top, 0], [1e-45, 0, 0], [1e-38, -1e-38, 1e-40], [np.inf, 1, -2], [np.nan, 448, 1]]
    x = np.empty((6, 3), CARRIER[dtype])
    from_float32(np.array(rows, np.float32), dtype, x)
    y = to_float32(decoded(Fp8TokenCodec(), encoded(Fp8TokenCodec(), x, dtype), x.shape, dtype), dtype)
    assert not y[0].any()
    assert np.isfinite(y[:4]).all()
    assert np.allclose(y[1] / top, [1, -1, 0], rtol=1e-2)
    assert np.isnan(y[4, 0])
    assert y[4, 1:].tolist() == [1, -2]
    assert np.isnan(y[5, 0])
    assert y[5, 1:].tolist() == [448, 1]


def test_loss_is_what_a_plain_computation_gives() -> None:
    x = random_sample(tokens=64, hidden_size=32, layer_ids=(0,), odd=False).states[:, 0]
    y = decoded(Fp8TokenCodec(), encoded(Fp8TokenCodec(), x, "bfloat16"), x.shape, "bfloat16")
    a, b = (torch.from_numpy(v).view(torch.bfloat16).double() for v in (x, y))
    tokens = (a - b).norm(dim=1) / a.norm(dim=1)
    loss = combine([measure(x[:40], y[:40], "bfloat16"), measure(x[40:], y[40:], "bfloat16")])
    assert loss.rms == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-3)
    assert loss.worst_token == pytest.approx(float(tokens.max()), rel=1e-3)
    same = combine([measure(x, x, "bfloat16")])
    assert (same.rms, same.worst_token) == (0, 0)
    zeros = np.zeros_like(x)
    assert combine([measure(zeros, x, "bfloat16")]).worst_token == np.inf
    assert combine([measure(zeros, zeros, "bfloat16")]).worst_token == 0


# -- names -----------------------------------------------------------------------------------------------------------


def test_codecs_by_name() -> None:
    assert {name: resolve_codec(name).to_dict() for name in CODECS} == {
        "fp8-token": {"name": "fp8-token"},
        "none": {"name": "none"},
        "split": {"name": "split"},
        "zstd": {"name": "zstd", "level": 1},
    }
    assert set(CODECS) == CODEC_NAMES
    assert ExtractConfig(output="x", model="m").codec == "split"


def test_an_unknown_codec_in_an_object_is_named() -> None:
    for d in ({"name": "lz77"}, {"name": 3}, {}):
        with pytest.raises(UnknownCodec, match=repr(str(d.get("name")))):
            codec_from_dict(d)
    for d in ({"name": "zstd", "level": 99}, {"name": "zstd", "level": True}, {"name": "split", "planes": 3}):
        with pytest.raises(FormatError, match=str(d["name"])):
            codec_from_dict(d)


def test_a_wrong_codec_name_raises_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'split'"):
        resolve_codec("splt")
    with pytest.raises(ConfigError, match="level"):
        resolve_codec({"name": "zstd", "level": 0})


@pytest.mark.parametrize(("value", "got"), [([1], "a list of 1"), (None, "None"), (7, "7"), ({"name": [1]}, "a list")])
def test_a_codec_of_another_type_is_named(value: Any, got: str) -> None:
    """A stored ``run.json`` may have any value there."""
    with pytest.raises(ConfigError, match=f"codec: expected one of fp8-token, .*, got {got}"):
        resolve_codec(value)
