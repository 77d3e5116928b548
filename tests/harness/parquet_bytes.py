"""Writes Parquet files byte by byte, also ones whose footer or page headers are wrong."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

#: Types of Thrift's compact protocol.
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
_CODECS = {"none": 0, "snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4_raw": 7}
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_PLAIN, _RLE, _DELTA_LENGTH, _DELTA = 0, 3, 6, 7


def varint(value: int) -> bytes:
    most = max(0, (value.bit_length() - 1) // 7)
    return bytes([*(value >> 7 * i & 127 | 128 for i in range(most)), value >> 7 * most])


def zigzag(value: int) -> bytes:
    return varint(value * 2 if value >= 0 else -value * 2 - 1)


def struct_of(*fields: tuple[int, int, bytes]) -> bytes:
    """Return a structure of Thrift's compact protocol: (number, type, encoded value) of each field."""
    return b"".join(bytes([kind]) + zigzag(number) + value for number, kind, value in fields) + b"\0"


def list_of(kind: int, items: list[bytes]) -> bytes:
    return bytes([0xF0 | kind]) + varint(len(items)) + b"".join(items)


def text(value: str) -> bytes:
    return varint(len(value)) + value.encode()


def data_page(
    texts: Iterable[str],
    codec: str = "none",
    *,
    more: int | bytes = 0,
    v2: bool = False,
    crc: int = 0,
    lengths: Sequence[int] = (),
    compressed: bool = True,
) -> bytes:
    """Return a data page with its header.

    Args:
        more: bytes after the values, or the number of zeros.
        crc: added to the right checksum.
        lengths: for each list of lengths of 0 how many it says. The texts are then empty.
        compressed: False: a page of ``v2`` whose header says that it is not compressed.
    """
    count, plain = 0, b""
    for value in texts:
        count, plain = count + 1, plain + struct.pack("<I", len(value)) + value.encode()
    if lengths:
        plain = b"".join(map(_zeros, lengths))
    plain += bytes(more)
    encoding = (_PLAIN, _DELTA_LENGTH, _DELTA)[len(lengths)]
    stored = plain if codec == "none" or not compressed else bytes(pa.Codec(codec).compress(plain))
    numbers = [(1, I32, zigzag(count))]
    if v2:
        numbers += [(2, I32, zigzag(0)), (3, I32, zigzag(count)), (4, I32, zigzag(encoding))]
        numbers += [(5, I32, zigzag(0)), (6, I32, zigzag(0)), (7, 1 if compressed else 2, b"")]
    else:
        numbers += [(2, I32, zigzag(encoding)), (3, I32, zigzag(_RLE)), (4, I32, zigzag(_RLE))]
    checksum = struct.unpack("<i", struct.pack("<I", zlib.crc32(stored) + crc & 0xFFFFFFFF))[0]
    header = struct_of(
        (1, I32, zigzag(_DATA_2 if v2 else _DATA)),
        (2, I32, zigzag(len(plain))),
        (3, I32, zigzag(len(stored))),
        (4, I32, zigzag(checksum)),
        (8 if v2 else 5, STRUCT, struct_of(*numbers)),
    )
    return header + stored


def _zeros(count: int) -> bytes:
    """Return ``count`` zeros in the encoding DELTA_BINARY_PACKED, in one block."""
    block = varint(max(-(-count // 128), 1) * 128)
    return block + varint(1) + varint(count) + zigzag(0) + (zigzag(0) + b"\0" if count > 1 else b"")


def dictionary_page(texts: list[str], codec: str = "none", *, more: int = 0) -> bytes:
    plain = b"".join(struct.pack("<I", len(value)) + value.encode() for value in texts) + bytes(more)
    stored = plain if codec == "none" else bytes(pa.Codec(codec).compress(plain))
    return (
        struct_of(
            (1, I32, zigzag(_DICTIONARY)),
            (2, I32, zigzag(len(plain))),
            (3, I32, zigzag(len(stored))),
            (7, STRUCT, struct_of((1, I32, zigzag(len(texts))), (2, I32, zigzag(_PLAIN)))),
        )
        + stored
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column chunk, with its numbers in the footer. ``left_out``: bytes at its end that the footer leaves out."""

    pages: list[bytes]
    values: int
    decoded: int
    left_out: int = 0
    dictionary: bytes = field(default=b"")


def write_parquet(path: Path, groups: list[dict[str, Chunk]], codec: str = "none", *, writer: str = "") -> None:
    """Write required columns of texts: for each row group, the chunks by their columns' names."""
    body, stored_groups = b"PAR1", []
    for group in groups:
        chunks = []
        for name, chunk in group.items():
            begin, data = len(body), chunk.dictionary + b"".join(chunk.pages)
            body += data
            meta = [
                (1, I32, zigzag(6)),
                (2, LIST, list_of(I32, [zigzag(_PLAIN), zigzag(_RLE)])),
                (3, LIST, list_of(BINARY, [text(name)])),
                (4, I32, zigzag(_CODECS[codec])),
                (5, I64, zigzag(chunk.values)),
                (6, I64, zigzag(chunk.decoded)),
                (7, I64, zigzag(len(data) - chunk.left_out)),
                (9, I64, zigzag(begin + len(chunk.dictionary))),
            ]
            if chunk.dictionary:
                meta.append((11, I64, zigzag(begin)))
            chunks.append(struct_of((2, I64, zigzag(begin)), (3, STRUCT, struct_of(*meta))))
        rows = next(iter(group.values())).values
        decoded = sum(chunk.decoded for chunk in group.values())
        stored_groups.append(
            struct_of((1, LIST, list_of(STRUCT, chunks)), (2, I64, zigzag(decoded)), (3, I64, zigzag(rows)))
        )
    rows = sum(next(iter(group.values())).values for group in groups)
    names = list(groups[0])
    schema = [struct_of((4, BINARY, text("schema")), (5, I32, zigzag(len(names))))]
    schema += [
        struct_of((1, I32, zigzag(6)), (3, I32, zigzag(0)), (4, BINARY, text(name)), (6, I32, zigzag(0)))
        for name in names
    ]
    footer = struct_of(
        (1, I32, zigzag(1)),
        (2, LIST, list_of(STRUCT, schema)),
        (3, I64, zigzag(rows)),
        (4, LIST, list_of(STRUCT, stored_groups)),
        *([(6, BINARY, text(writer))] if writer else []),
    )
    path.write_bytes(body + footer + struct.pack("<I", len(footer)) + b"PAR1")
