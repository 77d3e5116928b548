"""A conformance suite for codecs. Subclass ``CodecSuite`` in a pytest module and give it a ``codec``:

class TestMyCodec(CodecSuite):
    worst_token = 0.05  # for a lossy codec only

    @pytest.fixture
    def codec(self):
        return MyCodec(...)
"""

from __future__ import annotations

import json
import math
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, codec_from_dict
from hsx_dist.format.codecs.base import encode_into
from hsx_dist.format.container import EncodedPart, Part, SegmentEncoder, build_part
from hsx_dist.format.loss import measure
from hsx_dist.page import CARRIER, FLOATS
from hsx_dist.store.base import as_bytes_view
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore

_SHAPES = [(1, 1), (1, 64), (2, 7), (37, 24), (910, 576)]
every_dtype = pytest.mark.parametrize("dtype", list(FLOATS))


def encoded(codec: Codec, x: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Return the bytes that a codec stores for ``x``."""
    return b"".join(map(as_bytes_view, codec.encode(x, dtype)))


def decoded(codec: Codec, data: bytes, shape: tuple[int, int], dtype: str) -> np.ndarray[Any, Any]:
    """Decode stored bytes into memory that was not zero before."""
    out = np.full(shape, 0xA5A5, CARRIER[dtype])
    codec.decode(memoryview(data), out, dtype)
    return out


class CodecSuite:
    """Tests that every ``Codec`` must pass.

    ``worst_token``: limit of a lossy codec's relative error of a token's vector, for finite values of ordinary size.
    ``compresses``: whether the codec stores zeros in fewer bytes.
    """

    worst_token = 0.0
    compresses = True

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec to test. It must be registered."""
        raise NotImplementedError("expected a fixture `codec` in the subclass, got none. Override it")

    def test_is_a_frozen_codec(self, codec: Codec) -> None:
        assert isinstance(codec, Codec)
        assert type(codec.lossy) is bool
        hash(codec)
        with pytest.raises((AttributeError, TypeError)):
            codec.name = "other"  # type: ignore[misc]
        assert pickle.loads(pickle.dumps(codec)) == codec  # noqa: S301

    def test_a_codec_is_rebuilt_from_its_dictionary(self, codec: Codec) -> None:
        as_json = json.loads(json.dumps(codec.to_dict(), allow_nan=False))
        assert as_json["name"] == codec.name
        assert codec_from_dict(as_json) == codec

    @every_dtype
    @pytest.mark.parametrize("shape", _SHAPES, ids=str)
    def test_decoded_states_equal_the_encoded_states(self, codec: Codec, dtype: str, shape: tuple[int, int]) -> None:
        x = _layer(*shape, dtype)
        y = decoded(codec, encoded(codec, x, dtype), shape, dtype)
        if not codec.lossy:
            assert np.array_equal(x, y)
            return
        assert np.array_equal(_not_finite(x, dtype), _not_finite(y, dtype))

    @every_dtype
    def test_a_lossy_codec_loses_no_more_than_it_says(self, codec: Codec, dtype: str) -> None:
        x = _layer(200, 96, dtype, odd=False)
        y = decoded(codec, encoded(codec, x, dtype), x.shape, dtype)
        assert math.sqrt(measure(x, y, dtype).worst) <= self.worst_token

    @every_dtype
    @pytest.mark.parametrize("value", ["zero", "ones", "alternating"])
    def test_constant_layers(self, codec: Codec, dtype: str, value: str) -> None:
        one = {"bfloat16": 0x3F80, "float16": 0x3C00, "float32": 0x3F800000}[dtype]
        x = np.zeros((300, 128), CARRIER[dtype])
        x[:: 1 if value == "ones" else 2] = 0 if value == "zero" else one
        data = encoded(codec, x, dtype)
        assert np.array_equal(decoded(codec, data, x.shape, dtype), x)
        assert not self.compresses or len(data) < x.nbytes

    @every_dtype
    def test_strided_rows_give_the_same_bytes_and_take_them(self, codec: Codec, dtype: str) -> None:
        x = random_sample(tokens=50, dtype=dtype).states
        for k in range(x.shape[1]):
            data = encoded(codec, x[:, k], dtype)
            assert data == encoded(codec, np.ascontiguousarray(x[:, k]), dtype)
            whole = np.zeros_like(x)
            codec.decode(memoryview(data), whole[:, k], dtype)
            assert np.array_equal(whole[:, k], decoded(codec, data, x[:, k].shape, dtype))
            assert not np.delete(whole, k, axis=1).any()

    @every_dtype
    def test_buffers_outlive_the_next_call_and_leave_the_page_alone(self, codec: Codec, dtype: str) -> None:
        x = _layer(20, 24, dtype)
        before = x.copy()
        buffers = codec.encode(x, dtype)
        data = b"".join(map(as_bytes_view, buffers))
        codec.encode(np.zeros_like(x), dtype)
        assert b"".join(map(as_bytes_view, buffers)) == data
        assert np.array_equal(x, before)

    @every_dtype
    def test_encoding_into_given_memory_gives_the_same_bytes_and_reports_every_row(
        self, codec: Codec, dtype: str
    ) -> None:
        for x in (_layer(300, 576, dtype), _layer(1, 4, dtype), np.zeros((700, 64), CARRIER[dtype])):
            shown = np.empty((0, x.shape[1]), x.dtype)

            def look(rows: np.ndarray[Any, Any]) -> None:
                nonlocal shown
                shown = np.concatenate([shown, rows])

            data = encode_into(codec, x, dtype, lambda n: np.full(n, 0xA5, np.uint8), look)
            assert data.tobytes() == encoded(codec, x, dtype)
            assert np.array_equal(shown, x)

    def test_two_threads_give_the_same_bytes(self, codec: Codec) -> None:
        xs = [random_sample(tokens=300, hidden_size=64, seed=s).states[:, 0] for s in range(8)]
        alone = [encoded(codec, x, "bfloat16") for x in xs]
        back = [decoded(codec, data, xs[0].shape, "bfloat16") for data in alone]
        failed: list[int] = []

        def work() -> None:
            for i, x in enumerate(xs):
                data = encoded(codec, x, "bfloat16")
                if data != alone[i] or not np.array_equal(decoded(codec, data, x.shape, "bfloat16"), back[i]):
                    failed.append(i)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed

    @every_dtype
    def test_data_of_another_shape_or_length_is_refused(self, codec: Codec, dtype: str) -> None:
        data = encoded(codec, _layer(10, 8, dtype), dtype)
        for shape in ((9, 8), (11, 8), (10, 9), (1, 1), (4000, 500)):
            with pytest.raises(FormatError):
                decoded(codec, data, shape, dtype)
        for bad in (b"", data[:-1], data[1:], data + b"x", b"\xff" * 500, bytes(len(data) + 1)):
            with pytest.raises(FormatError):
                decoded(codec, bad, (10, 8), dtype)

    @every_dtype
    def test_changed_bytes_end_in_a_format_error_or_in_numbers(self, codec: Codec, dtype: str) -> None:
        """Changed bytes raise ``FormatError`` or decode to numbers, even if an attacker computed the checksum again."""
        data = encoded(codec, _layer(12, 16, dtype), dtype)
        rng = np.random.default_rng(0)
        for _ in range(400):
            bad = bytearray(data)
            for at in rng.integers(0, len(bad), rng.integers(1, 4)):
                bad[at] ^= rng.integers(1, 256)
            try:
                decoded(codec, bytes(bad), (12, 16), dtype)
            except FormatError as e:
                assert str(e)  # noqa: PT017

    @every_dtype
    def test_a_part_says_how_it_is_read(self, codec: Codec, dtype: str) -> None:
        sample = random_sample(tokens=40, dtype=dtype)
        first, again = (_part(codec, sample) for _ in range(2))
        assert first.crc32c == again.crc32c
        store = MemoryStore()
        store.put("p", first.buffers)
        part = Part.open(store, "p")
        assert part.codec == codec
        states = part.read(0)
        assert set(part.loss(0)) == (set(sample.layer_ids) if codec.lossy else set())
        assert codec.lossy or np.array_equal(states, sample.states)
        assert np.array_equal(part.read(0, layers=[15], tokens=(3, 35)), states[3:35, [1]])


def _layer(n: int, hidden_size: int, dtype: str, *, odd: bool = True) -> np.ndarray[Any, Any]:
    """Return random states of one layer. ``odd``: with a few infinities, NaN and noise."""
    return random_sample(tokens=n, hidden_size=hidden_size, layer_ids=(0,), dtype=dtype, odd=odd).states[:, 0]


def _not_finite(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    return np.equal(x & exponent, exponent)


def _part(codec: Codec, sample: Any) -> EncodedPart:
    encoder = SegmentEncoder(codec)
    for page in sample.pages():
        encoder.add(page)
    return build_part([encoder.finish()], codec, {"model": "a/b"})
