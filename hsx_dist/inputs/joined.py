"""Refuses files of a format with a footer or a directory that were joined one after the other (``cat a b > c``).

Libraries read only the last footer or directory. Of Parquet and Arrow, its offsets then point into the first file. So
the rows of one file would be missing without an error.
"""

from __future__ import annotations

import io
import re
from typing import Any
from zipfile import ZipFile

import numpy as np

from hsx_dist.errors import ConfigError, FormatError

ARROW_MAGIC = b"ARROW1"
#: The magic, the footer's length and the magic again, around an Arrow file's messages and its footer.
ARROW_BEGIN, ARROW_END = ARROW_MAGIC + b"\0\0", 4 + len(ARROW_MAGIC)
_BLOCK = np.dtype([("at", "<i8"), ("header", "<i4"), ("padding", "<i4"), ("body", "<i8")])
#: Numbers of the fields of an Arrow footer that are lists of blocks: dictionaries, record batches.
_BLOCKS = (2, 3)
_PARQUET_MAGIC = b"PAR1"
#: A footer in Thrift's compact protocol: the version, 1 or 2, and the list of columns.
_FOOTER_BEGIN = re.compile(rb"\x15[\x02\x04]\x19")
#: Limit of the places that are looked at. One whose footer is not in memory counts as ``_OUTSIDE``: it may take a
#: request to a server.
_MOST_PLACES, _OUTSIDE = 1_000_000, 10_000
#: Bytes before a footer that no file explains: it is longer. Arrow's mark of a stream's end takes 8.
_LEAST = 16
#: Limit of the bytes that are searched: a server may invent a size, and send as many bytes. Marks, page indexes and
#: filters of a file have fewer.
_MOST = 1 << 28
#: Bytes that are searched at once.
_READ = 16 << 20
_ZIP_BEGIN, _ZIP_END = b"PK\3\4", b"PK\5\6"
#: The largest end of a zip file: its end record with a comment. zip64 has two more records before it.
_MOST_ZIP_END, _ZIP64_END = 22 + (1 << 16), 76
_ZIP64_BEGIN, _ZIP64_LOCATOR = b"PK\6\6", b"PK\6\7"


def refuse_joined_parquet(file: io.RawIOBase, size: int, metadata: Any) -> None:
    """Raise FormatError if a Parquet file of ``size`` bytes follows another one in ``file``.

    ``metadata``: pyarrow's metadata of the last footer.
    """
    ends = [len(_PARQUET_MAGIC)]
    if metadata.num_row_groups:
        group = metadata.row_group(metadata.num_row_groups - 1)
        for i in range(group.num_columns):
            chunk = group.column(i)
            begins = [at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at]
            ends.append(min(begins, default=0) + chunk.total_compressed_size)
    footer = size - 8 - metadata.serialized_size
    _refuse_joined(file, footer - max(ends), _PARQUET_MAGIC, footers=True)


def refuse_joined_arrow(file: io.RawIOBase, footer_at: int, footer: bytes) -> None:
    """Raise FormatError if an Arrow file follows another one in ``file``.

    ``footer``: the bytes of the last footer, which Arrow has verified, and perhaps more. ``footer_at``: its position.
    """

    def number(at: int, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(footer[at : at + size], "little", signed=signed)

    table = number(0, 4)
    fields = table - number(table, 4, signed=True)  # polars writes the list of fields after the table
    end = len(ARROW_BEGIN)
    for field in _BLOCKS:
        slot = 4 + 2 * field
        if slot < number(fields, 2) and (offset := number(fields + slot, 2)):
            at = table + offset
            at += number(at, 4)
            blocks = np.frombuffer(footer, _BLOCK, number(at, 4), at + 4)
            end = max(end, int((blocks["at"] + blocks["header"] + blocks["body"]).max(initial=0)))
    _refuse_joined(file, footer_at - end, ARROW_BEGIN, footers=False)


def _footer(data: bytes, at: int, end: int) -> int | None:
    """Return where the footer of a Parquet file begins that ends at ``end``, if its length in ``data`` permits one.

    ``at``: where ``data`` begins.
    """
    length = end - 8 - at
    if length < 0:
        return None
    start = end - 8 - int.from_bytes(data[length : length + 4], "little")
    return start if start >= len(_PARQUET_MAGIC) else None


def _refuse_joined(file: io.RawIOBase, gap: int, magic: bytes, *, footers: bool) -> None:
    """Raise FormatError if ``magic`` is where another file ends or begins, or if that is not known.

    Other bytes may be between two files, such as a line's end. A row's text may be the magic, too. With ``footers``,
    the first bytes of the footer before it decide: its length is a claim. They are mostly in the bytes that are
    searched.

    Args:
        gap: bytes between the parts that the footer names and the footer itself. They are at least the bytes of the
            files before the last one, because the footer counts from its own file's begin. So the last file begins
            within the first ``gap`` bytes, and at their end but for its own marks, page indexes and filters.
        footers: ``magic`` ends the first file, after a footer. Otherwise it begins the second file.
    """
    if gap < _LEAST:
        return
    before = len(magic) if footers else 0
    places, stop = 0, gap + len(magic) - before
    # From the end, where the last file begins. Texts of the first file's rows are before.
    while stop > len(magic):
        at = max(1, stop - _READ)
        file.seek(at)
        data = file.read(stop - at) or b""
        found = len(data)
        while (found := data.rfind(magic, 0, found + len(magic) - 1)) >= 0:
            start, begin = _footer(data, at, at + found + before) if footers else None, b""
            if start is not None and start >= at:
                begin = data[start - at : start - at + 3]
            elif start is not None:
                places += _OUTSIDE
                file.seek(start)
                begin = file.read(3) or b""
            if not footers or _FOOTER_BEGIN.match(begin):
                raise FormatError(
                    "expected one file, got several that were joined one after the other. Libraries read only one of "
                    "them. Store them as files of a folder"
                )
            places += 1
            if places > _MOST_PLACES:
                raise _unknown(f"very many texts {magic.decode()} there")
        if at > 1 and gap - at > _MOST:
            raise _unknown("more")
        # Also a magic that begins before ``at + 4``: the length before it is not in ``data``.
        stop = at + len(magic) + 3 if at > 1 else 0


def _unknown(got: str) -> FormatError:
    return FormatError(
        f"expected at most {_MOST} bytes of page indexes and filters, got {got}. The file may be several that were "
        "joined. Write its rows to a new file without them"
    )


def refuse_joined_zip(archive: ZipFile) -> None:
    """Raise ConfigError if a zip file, or the beginning of one, follows another one in a file, or lacks entries.

    Other bytes before a zip file, such as the program of a self-extractor, are accepted. So are bytes of members that
    the directory does not name.
    """
    file: Any = archive.fp
    file.seek(max(file.seek(0, io.SEEK_END) - _MOST_ZIP_END - _ZIP64_END, 0))
    data = file.read(_MOST_ZIP_END + _ZIP64_END)
    # zipfile reads this one.
    has_comment = data[-22:-18] != _ZIP_END or data[-2:] != b"\0\0"
    end = data.rfind(_ZIP_END) if has_comment else len(data) - 22
    _require_entries(archive, data[:end], data[end:])
    if _ZIP_BEGIN in data[end + 22 + int.from_bytes(data[end + 20 : end + 22], "little") :]:
        raise _several_zips()
    first = min((member.header_offset for member in archive.filelist), default=0)
    if first == 0:
        return
    file.seek(0)
    is_zip = file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN
    file.seek(max(first - _MOST_ZIP_END, 0))
    data = file.read(min(first, _MOST_ZIP_END))
    for end in (found.start() for found in re.finditer(_ZIP_END, data)):
        comment = int.from_bytes(data[end + 20 : end + 22], "little")
        if is_zip or end + 22 + comment == len(data):
            raise _several_zips()


def _require_entries(archive: ZipFile, before: bytes, end: bytes) -> None:
    """Raise ConfigError if zipfile found another number of entries than the end record states, perhaps modulo 65,536.

    zipfile does not compare them. After a wrong length in one entry, it takes the next entries for its comment.
    """
    stated, modulus = int.from_bytes(end[10:12], "little"), 1 << 16
    record = before[-_ZIP64_END:]
    if record.startswith(_ZIP64_BEGIN) and record[56:60] == _ZIP64_LOCATOR:
        stated, modulus = int.from_bytes(record[32:40], "little"), 1 << 64
    if len(archive.filelist) % modulus != stated:
        raise ConfigError(
            f"input.path: expected {stated} entries in the zip file's directory, as its end states, got "
            f"{len(archive.filelist)}. Write or copy the file again"
        )


def _several_zips() -> ConfigError:
    return ConfigError(
        "input.path: expected one zip file, got several that were joined one after the other. zipfile reads only one "
        "of them. Store them as different files, or extract them"
    )
