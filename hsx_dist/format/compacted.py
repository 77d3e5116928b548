"""The compacted manifest: all receipts of a complete run in one compressed object, one per line."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zstandard

from hsx_dist.errors import FormatError, IntegrityError, NotFound
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.receipt_log import receipts_up_to
from hsx_dist.store import Store
from hsx_dist.text import head

#: The largest compacted manifest that is read.
MAX_COMPACTED_BYTES = 4 << 30
#: zstd's window for the levels up to 19. A frame names its window size, and libzstd allocates it.
_MAX_WINDOW = 8 << 20
#: All lines may have this many bytes. If they have more than the limit, the single receipts are read instead:
#: compressed bytes can expand 32,000 times. Sizes of the single receipts prove nothing: a file may have holes.
_FREE_BYTES = 2 << 20
#: Each compressed byte raises the limit for all lines by this many bytes. Most runs' lines expand 2 to 8 times. Those
#: with very long keys, or very many rows with one reason, expand up to 60 times: their readers fetch single receipts.
_EXPANSION = 8
#: Compressed bytes that are decompressed at once.
_READ = 1 << 14
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
    """The receipts that a completed attempt counts, by attempt, writer and number.

    Raises:
        IntegrityError: the object, or a single receipt that is read instead, is missing or damaged.
        FormatError: it is not a compacted manifest, or has other lines than its completion says.
    """
    about = complete["manifest"]
    where = f"{store.url}/{about['name']}"
    if about["size"] > MAX_COMPACTED_BYTES:
        raise FormatError(f"{where}: expected at most {MAX_COMPACTED_BYTES} bytes, got {about['size']}. {_INSTEAD}")
    if about["raw_size"] > _FREE_BYTES + _EXPANSION * about["size"]:
        return _single_receipts(store, complete["attempt"], about["receipts"], where)
    return _lines(store, about, where)


def _single_receipts(store: Store, attempt: int, expected: int, where: str) -> Iterator[Receipt]:
    number = 0
    for receipt in receipts_up_to(store, attempt):
        number += 1
        yield receipt
    if number < expected:
        raise IntegrityError(
            f"{where}: expected at least {expected} single receipts up to attempt {attempt}, got {number}. "
            "Restore them, or the attempt's .complete.json"
        )


def _lines(store: Store, about: Mapping[str, Any], where: str) -> Iterator[Receipt]:
    try:
        packed = store.get(about["name"], about["size"] + 1)
    except NotFound as e:
        raise IntegrityError(
            f"{where}: expected the compacted manifest of a completed attempt, got no object. {_INSTEAD}"
        ) from e
    found = crc32c_hex(crc32c(packed))
    if len(packed) != about["size"] or found != about.get("crc32c"):
        raise IntegrityError(
            f"{where}: expected {about['size']} bytes with crc32c {head(str(about.get('crc32c')), 40)}, got "
            f"{len(packed)} with {found}. {_INSTEAD}"
        )
    number, last = 0, (0, "", 0)
    try:
        _check_frame(packed, about["raw_size"], where)
        with _decompressed(packed) as reader:
            lines = io.BufferedReader(reader, 1 << 20)  # type: ignore[type-var]  # it has what is used of a raw stream
            while number <= about["receipts"] and (line := lines.readline(MAX_HEADER_BYTES + 1)):
                number += 1
                receipt = Receipt.from_json(line.rstrip(b"\n"), f"{where}, line {number}")
                if receipt.id <= last:
                    raise FormatError(
                        f"{where}, line {number}: expected a receipt after {last}, got {receipt.id}: lines are sorted "
                        f"by attempt, writer and number, and none is repeated. {_INSTEAD}"
                    )
                last = receipt.id
                yield receipt
    except zstandard.ZstdError as e:
        raise FormatError(f"{where}: expected a zstandard frame, got an error from zstd: {e}. {_INSTEAD}") from e
    if number != about["receipts"]:
        raise FormatError(f"{where}: expected {about['receipts']} receipts, got {number} or more. {_INSTEAD}")


def _check_frame(packed: bytes, raw_size: int, where: str) -> None:
    """Check the size of all lines, and that the frame is the whole object. A hole after a frame would raise the limit
    for all lines. Decompressing takes a small part of the time of parsing."""
    source, size = io.BytesIO(packed), 0
    with _decompressed(source) as reader:
        while size <= raw_size and (data := reader.read(1 << 20)):
            size += len(data)
        used = source.tell()
    if size != raw_size or used != len(packed):
        raise FormatError(
            f"{where}: expected one frame with {raw_size} bytes of lines, got at least {size} bytes from the first "
            f"{used} of {len(packed)} bytes. {_INSTEAD}"
        )


def _decompressed(source: bytes | io.BytesIO) -> zstandard.ZstdDecompressionReader:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    return decompressor.stream_reader(source, read_size=_READ)  # type: ignore[arg-type]  # BytesIO is a readable file
