"""The compacted manifest: all receipts of a complete run in one compressed object, one per line."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zstandard

from hsx_dist.errors import FormatError, IntegrityError, NotFound
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.names import parse_receipt_name, receipt_name
from hsx_dist.store import Store

#: The largest compacted manifest that is read.
MAX_COMPACTED_BYTES = 4 << 30
#: zstd's window for the levels up to 19. A frame names its window size, and libzstd allocates it.
_MAX_WINDOW = 8 << 20
#: One line, or all lines, may have this many bytes without proof. Above the limit, the sizes of the single receipts
#: must prove the size: compressed bytes can expand 32,000 times.
_FREE_BYTES = 2 << 20
#: Each compressed byte raises the limit for all lines by this many bytes. Most runs' lines expand 2 to 8 times. Those
#: with very long keys, or very many rows with one reason, expand up to 60 times: their readers list the receipts.
_EXPANSION = 8
_OWN = (rb'"attempt":([0-9]{1,9}),', rb'"writer":"([A-Za-z0-9._-]{1,128})",', rb'"seq":([0-9]{1,9}),')
_INSTEAD = "Restore it, or remove the attempt's .complete.json so that the single receipts are read"


def pack_receipts(receipts: Sequence[Receipt]) -> tuple[bytes, int]:
    """The receipts as compressed lines, and the lines' size. Compresses one line at a time: all may have gigabytes."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    packed, size = [], 0
    for receipt in receipts:
        line = receipt.to_json() + b"\n"
        size += len(line)
        packed.append(compressor.compress(line))
    packed.append(compressor.flush())
    return b"".join(packed), size


def read_compacted(store: Store, complete: Mapping[str, Any]) -> Iterator[Receipt]:
    """The receipts that a completed attempt counts.

    Raises:
        IntegrityError: the object is missing or damaged.
        FormatError: it is not a compacted manifest, or claims more bytes than the single receipts have.
    """
    about = complete["manifest"]
    where = f"{store.url}/{about['name']}"
    try:
        if about["size"] > MAX_COMPACTED_BYTES:
            raise FormatError(f"{where}: expected at most {MAX_COMPACTED_BYTES} bytes, got {about['size']}. {_INSTEAD}")
        packed = store.get(about["name"], about["size"] + 1)
    except NotFound as e:
        raise IntegrityError(
            f"{where}: expected the compacted manifest of a completed attempt, got no object. {_INSTEAD}"
        ) from e
    found = crc32c_hex(crc32c(packed))
    if len(packed) != about["size"] or found != about.get("crc32c"):
        raise IntegrityError(
            f"{where}: expected {about['size']} bytes with crc32c {str(about.get('crc32c'))[:40]}, got {len(packed)} "
            f"with {found}. {_INSTEAD}"
        )
    if about["raw_size"] > _FREE_BYTES + _EXPANSION * len(packed):
        _require_single_receipts(store, complete["attempt"], about["raw_size"], where)
    size = number = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(packed) as reader:
            lines = io.BufferedReader(reader, 1 << 20)  # type: ignore[type-var]  # it has what is used of a raw stream
            while line := lines.readline(min(about["raw_size"] - size, _FREE_BYTES) + 1):
                if len(line) > _FREE_BYTES and not line.endswith(b"\n"):
                    most = _size_of_receipt(store, line, f"{where}, line {number + 1}")
                    line += lines.readline(max(most + 1 - len(line), 0))
                size += len(line)
                number += 1
                if size > about["raw_size"] or number > about["receipts"]:
                    break
                yield Receipt.from_json(line.rstrip(b"\n"), f"{where}, line {number}")
    except zstandard.ZstdError as e:
        raise FormatError(f"{where}: expected a zstandard frame, got an error from zstd: {e}. {_INSTEAD}") from e
    if (size, number) != (about["raw_size"], about["receipts"]):
        raise FormatError(
            f"{where}: expected {about['receipts']} receipts of {about['raw_size']} bytes in all, got at least "
            f"{number} of {size} bytes. {_INSTEAD}"
        )


def _require_single_receipts(store: Store, attempt: int, raw_size: int, where: str) -> None:
    stored = 0
    for info in store.list("manifest/"):
        parsed = parse_receipt_name(info.name)
        if parsed is not None and parsed[0] <= attempt:
            stored += min(info.size, MAX_HEADER_BYTES) + 1  # a file with holes has any size
    if stored < raw_size:
        raise FormatError(
            f"{where}: expected lines of at most {stored} bytes, the size of the single receipts, got a declared "
            f"size of {raw_size} bytes. {_INSTEAD}"
        )


def _size_of_receipt(store: Store, begin: bytes, where: str) -> int:
    """The size of the single receipt with the attempt, writer and number at the beginning of the line."""
    found = [re.search(pattern, begin[:4096]) for pattern in _OWN]
    attempt, writer, seq = (m[1].decode() if m is not None else "0" for m in found)
    try:
        # No longer receipt is read. A file with holes has any size.
        return min(store.head(receipt_name(int(attempt), writer, int(seq))).size, MAX_HEADER_BYTES)
    except (NotFound, ValueError) as e:
        raise FormatError(
            f"{where}: expected a single receipt for a line of more than {_FREE_BYTES} bytes, got none. {_INSTEAD}"
        ) from e
