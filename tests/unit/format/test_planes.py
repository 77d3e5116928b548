"""The compiled decoder of ``split`` against libzstd: the same values, or no answer; whatever the frame holds."""

from __future__ import annotations

import logging
import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.codecs import SplitCodec, planes
from hsx_dist.format.codecs.huffman import join_planes
from hsx_dist.format.codecs.zstd import compress_huffman, walk
from tests.soak.frames import compare, expected, forged, high_bytes, joined


@pytest.mark.parametrize("spread", [0.8, 2.0, 6.0, 12.0])
@pytest.mark.parametrize("n", [40_000, 128 << 10, (128 << 10) + 20_000, 524_160, 1_000_003])
def test_planes_of_floats_are_decoded_by_it_and_alike(n, spread):
    rng = np.random.default_rng(n)
    high, low = high_bytes(rng, n, spread=spread), rng.integers(0, 256, n, np.uint8)
    frame = compress_huffman(high)
    found = joined(frame, low)
    assert found is not None, "left to libzstd"
    np.testing.assert_array_equal(found, expected(frame, low))
    np.testing.assert_array_equal(found >> 8, high)


@pytest.mark.parametrize(("width", "apart"), [(576, 0), (576, 576 * 3), (1, 1), (7, 2), (4096, 128)])
def test_rows_that_lie_apart_and_nothing_between_them(width, apart):
    rng = np.random.default_rng(0)
    n = 200_000 // width * width
    high, low = high_bytes(rng, n), rng.integers(0, 256, n, np.uint8)
    found = joined(compress_huffman(high), low, width=width, apart=apart)
    np.testing.assert_array_equal(found, low.astype(np.uint16) | high.astype(np.uint16) << 8)


def test_memory_that_is_too_small_is_refused():
    rng = np.random.default_rng(0)
    high, low = high_bytes(rng, 100_000), rng.integers(0, 256, 100_000, np.uint8)
    frame = compress_huffman(high)
    place = walk(memoryview(frame), 100_000)
    for size, width, pitch in ((99_999, 1000, 1000), (100_000, 1000, 1001), (100_000, 1000, 999), (100_000, 999, 999)):
        assert not join_planes(np.frombuffer(frame, np.uint8), *place, low, np.zeros(size, np.uint16), width, pitch)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300_000),
    st.sampled_from([1, 2, 3, 5, 17, 100, 130, 200, 256]),
    st.floats(0.1, 60),
    st.integers(0, 1 << 30),
    st.sampled_from(["huffman", 1, 2, 3, 9, 19, "checked"]),
)
def test_whatever_libzstd_makes_is_decoded_alike_or_left_to_it(n, alphabet, spread, seed, how):
    rng = np.random.default_rng(seed)
    high, low = high_bytes(rng, n, spread=spread, alphabet=alphabet), rng.integers(0, 256, n, np.uint8)
    if how == "huffman":
        frame = compress_huffman(high)
    else:
        level = 1 if how == "checked" else how
        frame = zstandard.ZstdCompressor(level=level, write_checksum=how == "checked").compress(high.data)
    found = joined(frame, low)
    if found is not None:
        np.testing.assert_array_equal(found, expected(frame, low))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 40))
def test_damaged_frames_are_decoded_as_libzstd_does_or_left_to_it(seed):
    compare(random.Random(seed))


def test_damaged_frames_are_decoded_by_it_often_enough_to_tell():
    tally = sum((compare(random.Random(seed)) for seed in range(100)), Counter())
    assert tally["decoded alike"] > 200
    assert tally["left to libzstd"] > 200


def test_frames_cut_short_or_longer_are_refused_before_they_are_decoded():
    rng = np.random.default_rng(0)
    frame = compress_huffman(high_bytes(rng, 100_000))
    for wrong in (frame[:-1], frame[:50], frame + b"x", b"", b"no zstd frame at all"):
        with pytest.raises(FormatError):
            walk(memoryview(wrong), 100_000)
    with pytest.raises(FormatError):
        walk(memoryview(frame), 99_999)


# -- when it is used -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not decoded anything."""
    monkeypatch.setattr(planes, "current", None)


def encoded(dtype: str = "bfloat16", rows: int = 300) -> tuple[np.ndarray, memoryview]:
    rng = np.random.default_rng(1)
    x = (high_bytes(rng, rows * 576).astype(np.uint16) << 8 | rng.integers(0, 256, rows * 576, np.uint16)).reshape(
        -1, 576
    )
    return x, memoryview(bytes(SplitCodec().encode_into(x, dtype)))


@pytest.mark.parametrize("said", ["always", "never", "auto"])
def test_the_environment_chooses_and_values_are_the_same(fresh, monkeypatch, said):
    monkeypatch.setenv(planes.VARIABLE, said)
    calls = []
    monkeypatch.setattr("hsx_dist.format.codecs.huffman.join_planes", lambda *a: calls.append(a) or join_planes(*a))
    x, data = encoded()
    whole = np.zeros((len(x), 3, 576), np.uint16)  # a layer of a reader's array
    SplitCodec().decode(data, whole[:, 1], "bfloat16")
    np.testing.assert_array_equal(whole[:, 1], x)
    assert not whole[:, 0].any()
    assert not whole[:, 2].any()
    assert len(calls) == (said == "always")


def test_another_word_in_the_environment_is_an_error(fresh, monkeypatch):
    monkeypatch.setenv(planes.VARIABLE, "sometimes")
    x, data = encoded()
    with pytest.raises(ConfigError, match="expected auto, always or never, came 'sometimes'"):
        SplitCodec().decode(data, np.empty_like(x), "bfloat16")


def test_it_starts_when_enough_was_decoded_and_on_one_thread(monkeypatch):
    x, data = encoded()
    monkeypatch.setattr(planes, "current", planes.Planes(2.5 * x.nbytes))
    started = []
    monkeypatch.setattr(planes.importlib, "import_module", lambda name: started.append(name) or sys.modules[name])

    def decode() -> None:
        out = np.empty_like(x)
        SplitCodec().decode(data, out, "bfloat16")
        np.testing.assert_array_equal(out, x)

    decode()
    decode()
    assert started == []
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert started == ["hsx_dist.format.codecs.huffman"]
    assert planes.current._join is join_planes


@pytest.mark.parametrize("error", [ImportError("no numba"), RuntimeError("cannot compile")])
def test_without_numba_libzstd_does_it(monkeypatch, caplog, error):
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(planes, "current", planes.Planes(0))
    monkeypatch.setattr(planes.importlib, "import_module", refuse)
    x, data = encoded()
    with caplog.at_level(logging.DEBUG, "hsx_dist"):
        for _ in range(2):
            out = np.empty_like(x)
            SplitCodec().decode(data, out, "bfloat16")
            np.testing.assert_array_equal(out, x)
    assert caplog.text.count("by libzstd alone") == 1
    assert str(error) in caplog.text


def test_settings_of_numba_in_the_working_folder_are_not_used(monkeypatch, caplog, tmp_path):
    (tmp_path / planes.NUMBA_SETTINGS).write_text("cache_dir: cache\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planes, "current", planes.Planes(0))
    monkeypatch.setattr(planes.importlib, "import_module", lambda _: pytest.fail("numba was imported"))
    x, data = encoded()
    for _ in range(2):
        out = np.empty_like(x)
        SplitCodec().decode(data, out, "bfloat16")
        np.testing.assert_array_equal(out, x)
    assert caplog.text.count("expected no .numba_config.yaml in the working folder") == 1


def test_what_is_damaged_is_libzstds_to_refuse(monkeypatch):
    monkeypatch.setattr(planes, "current", planes.Planes(0))
    x, data = encoded()
    broken = bytearray(data)
    broken[x.size + 200] ^= 0xFF
    try:
        want = np.empty_like(x)
        monkeypatch.setattr(planes, "current", planes.Planes(math.inf))
        SplitCodec().decode(memoryview(broken), want, "bfloat16")
    except FormatError:
        want = None
    monkeypatch.setattr(planes, "current", planes.Planes(0))
    out = np.empty_like(x)
    if want is None:
        with pytest.raises(FormatError):
            SplitCodec().decode(memoryview(broken), out, "bfloat16")
    else:
        SplitCodec().decode(memoryview(broken), out, "bfloat16")
        np.testing.assert_array_equal(out, want)


def test_a_tree_deeper_than_its_codes_is_refused_as_libzstd_does():
    """Weights 2 and 2: the codes use up all bits, but none is as long as the tree is deep."""
    low = np.zeros(40, np.uint8)
    wrong = 0
    for seed in range(300):
        frame = forged(random.Random(seed), low.size)
        try:
            expected(frame, low)
        except FormatError:
            wrong += 1
            try:
                assert joined(frame, low) is None
            except FormatError:
                continue
    assert wrong > 20


SCRIPT = """
import numpy as np
from hsx_dist.format.codecs import SplitCodec, planes
x = np.random.default_rng(0).normal(size=(300, 576)).astype(np.float32).view(np.uint16)
out = np.empty_like(x)
SplitCodec().decode(memoryview(bytes(SplitCodec().encode_into(x, "bfloat16"))), out, "bfloat16")
assert (out == x).all()
print(planes.current._join)
"""


def run(script: str, **environment: str) -> str:
    argv = [sys.executable, "-c", script]
    environment = {**os.environ, planes.VARIABLE: "always", **environment}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_numba_compiles_nothing_libzstd_does_it():
    assert run(SCRIPT, NUMBA_DISABLE_JIT="1") == "None"


@pytest.mark.slow
def test_without_a_folder_to_keep_it_in_it_is_compiled_all_the_same():
    """numba says so by a RuntimeError where neither the package's folder nor a user's may be written."""
    nowhere = "from numba.core import caching\ncaching.CacheImpl._locator_classes = []\n"
    assert "join_planes" in run(nowhere + SCRIPT)


def test_no_rows_at_all():
    x = np.empty((0, 576), np.uint16)
    data = memoryview(bytes(SplitCodec().encode_into(x, "bfloat16")))
    SplitCodec().decode(data, np.empty_like(x), "bfloat16")
