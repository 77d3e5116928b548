"""CRC-32C (Castagnoli, the one of iSCSI, S3 and GCS) of buffers, without copying them."""

from __future__ import annotations

from collections.abc import Iterable

import crc32c as _crc32c

from hsx_dist.store.base import Buffer, as_bytes_view


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C of the bytes of ``data``, an int in ``[0, 2**32)``; ``value`` is the crc of what came before it.

    ``data`` may be any C-contiguous buffer of any item type and shape; its bytes are taken in memory order.
    Raises ``ValueError`` when ``data`` is not contiguous.
    """
    if isinstance(data, bytes):
        return int(_crc32c.crc32c(data, value))
    view = as_bytes_view(data)
    return int(_crc32c.crc32c(view, value))


def crc32c_all(buffers: Iterable[Buffer], value: int = 0) -> int:
    """CRC-32C of the concatenation of ``buffers``."""
    for data in buffers:
        value = crc32c(data, value)
    return value


def crc32c_hex(value: int) -> str:
    """The crc as receipts and headers write it: eight lower-case hex digits."""
    return f"{value:08x}"
