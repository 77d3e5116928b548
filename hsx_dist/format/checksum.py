"""CRC-32C (Castagnoli, as in iSCSI, S3 and GCS) of buffers, without copying them."""

from __future__ import annotations

from functools import lru_cache

import crc32c as _crc32c

from hsx_dist.errors import IntegrityError
from hsx_dist.store.base import Buffer, as_bytes_view


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C of the bytes of ``data``, an int in ``[0, 2**32)``; ``value`` is the crc of the preceding bytes.

    ``data`` may be any C-contiguous buffer of any item type and shape; its bytes are read in memory order.
    Raises ``ValueError`` when ``data`` is not contiguous.
    """
    if isinstance(data, bytes):
        return int(_crc32c.crc32c(data, value))
    view = as_bytes_view(data)
    return int(_crc32c.crc32c(view, value))


def check_crc32c(found: int, expected: int, what: str) -> None:
    """Raise ``IntegrityError`` if the checksum ``found`` of ``what`` is not the ``expected`` one."""
    if found != expected:
        raise IntegrityError(
            f"{what}: expected crc32c {crc32c_hex(expected)}, got {crc32c_hex(found)}: the bytes changed. Restore the "
            "object, or delete it and compute its samples again"
        )


def crc32c_join(value: int, following: int, nbytes: int) -> int:
    """CRC-32C of two concatenated byte strings: the first has crc ``value``; the second has crc ``following`` and
    ``nbytes`` bytes.

    The bytes are not read. The method is that of zlib's ``crc32_combine`` (Mark Adler): appending ``n`` zero bytes is a
    multiplication by x^(8n) modulo the polynomial.
    """
    return _product(_zeros(nbytes), value) ^ following


_POLYNOMIAL = 0x82F63B78  # bits reversed, like all numbers here: the highest bit is x^0


def _product(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial."""
    found = 0
    while a:
        if a & 0x80000000:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@lru_cache(maxsize=4096)
def _zeros(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    found, power = 0x80000000, 0x00800000
    while nbytes:
        if nbytes & 1:
            found = _product(power, found)
        power = _squared(power)
        nbytes >>= 1
    return found


@lru_cache(maxsize=128)
def _squared(power: int) -> int:
    return _product(power, power)


def crc32c_hex(value: int) -> str:
    """The crc as receipts and headers write it: eight lower-case hex digits."""
    return f"{value:08x}"
