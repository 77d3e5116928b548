from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.format.checksum import crc32c, crc32c_hex, crc32c_join


def test_the_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b))])
def test_every_kind_of_buffer(kind: type) -> None:
    data = np.arange(999, dtype=np.uint16).tobytes()
    assert crc32c(kind(data)) == crc32c(data)


def test_arrays_count_in_memory_order() -> None:
    a = np.arange(60, dtype=np.uint32).reshape(3, 4, 5)
    assert crc32c(a) == crc32c(a.tobytes()) == crc32c(a.data)
    assert crc32c(a[1]) == crc32c(a[1].tobytes())
    assert crc32c(np.empty((0, 7), np.uint16), 5) == 5


def test_strided_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        crc32c(np.arange(10)[::2])
    with pytest.raises(ValueError, match="C-contiguous"):
        crc32c(np.zeros((3, 4)).T)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=10))
def test_pieces_are_the_whole(pieces: list[bytes]) -> None:
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    assert value == crc32c(b"".join(pieces))


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=300))
def test_joined_without_being_read(first: bytes, second: bytes) -> None:
    assert crc32c_join(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("nbytes", [1 << 20, (5 << 20) + 3])
def test_long_ones_joined(nbytes: int) -> None:
    second = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    assert crc32c_join(crc32c(b"first"), crc32c(second), nbytes) == crc32c(second, crc32c(b"first"))


def test_hex_has_eight_digits() -> None:
    assert crc32c_hex(0xAB) == "000000ab"
