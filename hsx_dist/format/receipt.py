"""Receipts: the proof that a part is stored whole, and the fate of rows without a sample.

Stored as ``{"crc32c":"8 hex digits","receipt":BODY}`` with the checksum of the bytes of BODY. Unknown members of the
body are ignored, so that later versions can add some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal, get_args

import numpy as np

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.json_objects import check_containers, json_decoder, json_errors, shown
from hsx_dist.format.known_members import end_of, parse_members
from hsx_dist.format.names import LARGEST_NUMBER, MAX_KEY, MAX_LABEL, WRITER, parse_part_name
from hsx_dist.format.segment_info import MAX_COLUMNS, MAX_TOKENS
from hsx_dist.format.segments import SegmentProof, SegmentTable
from hsx_dist.text import MAX_REASON, bounded, head, printable

__all__ = ["Receipt", "RowFate", "SegmentProof"]

#: The second format is for samples with several columns. An older reader would take each column for the whole sample.
_FORMAT, _FORMAT_OF_COLUMNS = "hsx-receipt/1", "hsx-receipt/2"
_BEFORE_CRC, _AFTER_CRC = b'{"crc32c":"', b'","receipt":'
_HEADER = len(_BEFORE_CRC) + 8 + len(_AFTER_CRC)
# Segments are stored as a table, not as objects, because a receipt may prove tens of thousands.
_SEGMENT_COLUMNS = [
    "key", "index", "start", "stop", "total", "slot", "token_hash", "raw_bytes", "stored_bytes", "row", "sample_hash"
]  # fmt: skip
_SEGMENT_COLUMNS_OF_COLUMNS = [*_SEGMENT_COLUMNS, "column", "columns"]
_ROW_COLUMNS = ["key", "row", "fate", "reason", "tries", "content"]
_HEX8, _HEX = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]*")
#: The largest numbers that a receipt may hold. Sums over the receipts of any run then fit 64 bits, or are computed
#: exactly.
MAX_PART_BYTES = 1 << 50
_LARGEST_ROW = 2**62
#: A refused row without an id has the label of its file as key, and the row's number behind it.
MAX_ROW_KEY = MAX_LABEL + 32
_PART = re.compile(r"[!-~]{1,1024}")
#: A row of a receipt, which is a list, takes at least 25 bytes. A receipt has few other lists, objects and members.
_FEW, _BYTES_OF_A_ROW = 64, 16
#: Members that are decoded. Other members, and objects in these, would take up to 30 times the memory of their text.
_KNOWN = dict.fromkeys(
    ["format", "attempt", "writer", "seq", "part", "size", "crc32c", "header_bytes", "raw_bytes", "segment_columns",
     "segments", "contents", "row_columns", "rows", "created", "void"],
    json_decoder(floats=True, objects=False).raw_decode,
)  # fmt: skip
_Json = dict[str, Any]

Fate = Literal["refused", "failed", "poison", "withdrawn"]


@dataclass(frozen=True, slots=True)
class RowFate:
    """A row without a sample, and the reason.

    ``refused``: the row cannot have a sample. ``failed``: the row may be tried again. ``poison``: the engine died at
    each try; the row is tried again only on request. ``withdrawn``: revokes an earlier fate of the key, as the row was
    corrected.

    ``reason``: redacted, printable, at most 1,000 characters; it is made so, because it may be a library's error. A
    ``stored`` one is only made printable and short: it may have any size, and redaction of many takes long.
    ``content``: hash of the row's content, which distinguishes a corrected row from the refused one; empty when the row
    could not be read.

    Example:
        >>> {key: fate.reason for key, fate in run.refused.items()}
        {}
    """

    key: str
    row: int | None
    fate: Fate
    reason: str
    tries: int
    content: str = ""
    stored: InitVar[bool] = False

    def __post_init__(self, stored: bool) -> None:
        object.__setattr__(self, "reason", printable(self.reason, MAX_REASON) if stored else bounded(self.reason))


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt number ``seq`` (from 1, without gaps) of one writer in one attempt.

    ``part``: the stored object's name, or ``None`` when the receipt has only rows; then ``size``, ``header_bytes`` and
    ``raw_bytes`` are 0. ``crc32c``: eight hex digits, over the whole object. ``size``: bytes of the object.
    ``header_bytes``: bytes of the header at its begin. ``created``: ISO 8601, UTC.
    """

    attempt: int
    writer: str
    seq: int
    part: str | None
    size: int
    crc32c: str
    header_bytes: int
    raw_bytes: int
    #: Stored as a ``SegmentTable``; any other sequence is converted.
    segments: Sequence[SegmentProof]
    rows: tuple[RowFate, ...]
    created: str
    #: Parts that earlier attempts proved but this attempt did not find. They prove nothing any more.
    void: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", SegmentTable.of(self.segments))

    @property
    def table(self) -> SegmentTable:
        """``segments`` as arrays."""
        assert isinstance(self.segments, SegmentTable)
        return self.segments

    @property
    def id(self) -> tuple[int, str, int]:
        """Attempt, writer and number: unique among the receipts of a run."""
        return self.attempt, self.writer, self.seq

    def to_json(self) -> bytes:
        """The stored form of the receipt: one line. Equal receipts result in equal bytes."""
        several = self.table.several_columns
        body = {
            "format": _FORMAT_OF_COLUMNS if several else _FORMAT,
            "attempt": self.attempt,
            "writer": self.writer,
            "seq": self.seq,
            "part": self.part,
            "size": self.size,
            "crc32c": self.crc32c,
            "header_bytes": self.header_bytes,
            "raw_bytes": self.raw_bytes,
            "segment_columns": _SEGMENT_COLUMNS_OF_COLUMNS if several else _SEGMENT_COLUMNS,
            "segments": self.table.json_rows(),
            **({"contents": contents} if (contents := self.table.contents) else {}),
            "row_columns": _ROW_COLUMNS,
            "rows": [[r.key, r.row, r.fate, r.reason, r.tries, r.content] for r in self.rows],
            "created": self.created,
            **({"void": list(self.void)} if self.void else {}),
        }
        text = json.dumps(body, separators=(",", ":")).encode("ascii")
        return b"".join((_BEFORE_CRC, crc32c_hex(crc32c(text)).encode(), _AFTER_CRC, text, b"}"))

    @classmethod
    def from_json(cls, data: bytes, where: str = "receipt") -> Receipt:
        """The inverse of ``to_json``; ``where`` names the object in errors.

        Raises:
            IntegrityError: the checksum does not match.
            FormatError: it is not a receipt, has a later format, or has invalid values.
        """
        body = _open(data, where)
        try:
            return _receipt(body)
        except (KeyError, TypeError, ValueError) as e:
            what = f"it lacks the member {e}" if isinstance(e, KeyError) else str(e)
            raise FormatError(
                f"{where}: expected a receipt, got an invalid one ({what}). It was not written by hsx_dist, or is "
                "damaged. Restore it"
            ) from e


def begins_receipt(data: bytes) -> bool:
    """Whether ``data`` begins like a stored receipt, of any version."""
    return data.startswith(_BEFORE_CRC) and data[_HEADER - len(_AFTER_CRC) : _HEADER] == _AFTER_CRC


def _open(data: bytes, where: str) -> _Json:
    """The body. Its checksum is verified before it is parsed."""
    if not begins_receipt(data):
        raise FormatError(
            f"{where}: expected a receipt, which begins with {_BEFORE_CRC.decode()!r}, got {data[:24]!r}. It was not "
            "written by hsx_dist, or is damaged. Restore it"
        )
    text, stored = data[_HEADER:-1], data[len(_BEFORE_CRC) : len(_BEFORE_CRC) + 8]
    found = crc32c_hex(crc32c(text))
    if data[-1:] != b"}" or stored != found.encode():
        raise IntegrityError(
            f"{where}: expected crc32c {stored.decode('ascii', 'replace')}, got {found}: the receipt changed after it "
            "was written. Restore it. Without it, the samples of its part count as missing"
        )
    most = _FEW + len(text) // _BYTES_OF_A_ROW
    check_containers(text, most, where)
    try:
        with json_errors():
            body = parse_members(text.decode(), _KNOWN, lambda value, at: end_of(value, at, most, "the receipt"))
    except FormatError as e:
        raise FormatError(
            f"{where}: {e}. The receipt is damaged, or of a later version. Restore it, or update hsx_dist"
        ) from e
    if body.get("format") not in (_FORMAT, _FORMAT_OF_COLUMNS):
        expected = f"{_FORMAT!r} or {_FORMAT_OF_COLUMNS!r}"
        raise FormatError(
            f"{where}: expected format {expected}, got {shown(body.get('format'))}. Update hsx_dist to read it"
        )
    return body


def _receipt(b: _Json) -> Receipt:
    several = b["format"] == _FORMAT_OF_COLUMNS
    segment_columns = _SEGMENT_COLUMNS_OF_COLUMNS if several else _SEGMENT_COLUMNS
    for name, columns in (("segment_columns", segment_columns), ("row_columns", _ROW_COLUMNS)):
        if b[name] != columns:
            raise ValueError(f"{name}: expected {columns}, got {shown(b[name])}")
    part = None if b["part"] is None else _text(b["part"], "part")
    segments = _segments(b["segments"], len(segment_columns), b.get("contents"))
    if part is None and segments:
        raise ValueError("part: expected the name of the part that has the segments, got none")
    if several != segments.several_columns:
        raise ValueError(f"format: expected {_FORMAT!r} for samples of one column, got {shown(b['format'])}")
    receipt = Receipt(
        attempt=_count(b["attempt"], "attempt", LARGEST_NUMBER, 1),
        writer=_text(b["writer"], "writer"),
        seq=_count(b["seq"], "seq", LARGEST_NUMBER, 1),
        part=part,
        size=_count(b["size"], "size", MAX_PART_BYTES),
        crc32c=_text(b["crc32c"], "crc32c"),
        header_bytes=_count(b["header_bytes"], "header_bytes", MAX_PART_BYTES),
        raw_bytes=_count(b["raw_bytes"], "raw_bytes", MAX_PART_BYTES),
        segments=segments,
        rows=tuple(map(_fate, b["rows"])),
        created=_text(b["created"], "created"),
        void=tuple(map(_lost_part, b.get("void", ()))),
    )
    if not WRITER.fullmatch(receipt.writer):
        raise ValueError(f"writer: expected a writer's name, got {head(receipt.writer, 80)!r}")
    # Retention deletes the parts that receipts name, so a receipt may name only a part that its writer stored.
    own = (receipt.attempt, receipt.writer)
    if part is not None and (not _PART.fullmatch(part) or (parse_part_name(part) or ())[:2] != own):
        raise ValueError(f"part: expected the name of a part of writer {receipt.writer}, got {head(part, 80)!r}")
    if not _HEX8.fullmatch(receipt.crc32c):
        raise ValueError(f"crc32c: expected 8 hex digits, got {receipt.crc32c!r}")
    if receipt.header_bytes > receipt.size:
        raise ValueError(f"header_bytes: expected at most size ({receipt.size}), got {receipt.header_bytes}")
    return receipt


def _segments(rows: Any, width: int, contents: Any) -> SegmentTable:
    """The table of segments. Checked by column, for speed: a receipt may have tens of thousands of rows.

    ``contents``: the hash of each segment's input row. ``None``: unknown, as in receipts of earlier versions.
    """
    if not rows:
        return SegmentTable.of(())
    if set(map(len, rows)) != {width}:
        raise ValueError(f"segments: expected rows of {width} values, got rows of {sorted(set(map(len, rows)))[:8]}")
    key, index, start, stop, total, slot, token_hash, raw, stored, number, sample_hash, *of = zip(*rows, strict=True)
    row = [-1 if n is None else _count(n, "segments: row", _LARGEST_ROW) for n in number]
    for column, most in ((index, MAX_TOKENS), (start, MAX_TOKENS), (stop, MAX_TOKENS), (total, MAX_TOKENS)):
        _check_counts(column, most)
    for column in (raw, stored):
        _check_counts(column, MAX_PART_BYTES)
        if sum(column) > MAX_PART_BYTES:
            raise ValueError(f"segments: expected at most {MAX_PART_BYTES} bytes in all, got {sum(column)}")
    if set(map(type, key)) != {str} or not all(key):
        raise ValueError("segments: expected keys, got an empty string or another type")
    if (longest := max(map(len, key))) > MAX_KEY:
        raise ValueError(f"segments: expected keys of at most {MAX_KEY} characters, got one of {longest}")
    if not _are_hashes(token_hash):
        raise ValueError("segments: expected token hashes of 16 hex digits, got another value")
    if not _are_hashes(tuple(h for h in sample_hash if h != "")):
        raise ValueError("segments: expected sample hashes of 16 hex digits or empty strings, got another value")
    if set(map(type, slot)) != {int} or slot != tuple(range(len(rows))):
        raise ValueError("slots: expected 0, 1, 2, …, got another value or order")
    of = of or [(0,) * len(rows), (1,) * len(rows)]
    _check_columns(of[0], of[1], sample_hash)
    numbers = np.array([index, start, stop, total, raw, stored, row, *of], dtype=np.int64).T
    bad = ~((numbers[:, 1] < numbers[:, 2]) & (numbers[:, 2] <= numbers[:, 3]))
    if bad.any():
        raise ValueError(f"segments: expected start < stop <= total, got {numbers[bad][0, 1:4].tolist()}")
    contents = [""] * len(rows) if contents is None else contents
    if (
        not isinstance(contents, list)
        or len(contents) != len(rows)
        or not _are_hashes(tuple(h for h in contents if h != ""))
    ):
        raise ValueError("contents: expected 16 hex digits or an empty string for each segment, got others")
    return SegmentTable(key, numbers, list(zip(token_hash, sample_hash, contents, strict=True)))


def _check_columns(column: tuple[Any, ...], columns: tuple[Any, ...], sample_hash: tuple[str, ...]) -> None:
    for values in (column, columns):
        _check_counts(values, MAX_COLUMNS)
    if any(i >= n for i, n in zip(column, columns, strict=True)):
        raise ValueError("segments: expected column < columns, got a column that the sample does not have")
    # Segments of two columns may end at different tokens: only the sample's hash proves that they are of one sample.
    if any(n > 1 and not known for n, known in zip(columns, sample_hash, strict=True)):
        raise ValueError("segments: expected the sample's hash with several columns, got none")


def _check_counts(column: tuple[Any, ...], most: int) -> None:
    if set(map(type, column)) != {int} or not 0 <= min(column) <= max(column) <= most:
        raise ValueError(f"segments: expected counts from 0 to {most}, got another value")


def _are_hashes(column: tuple[Any, ...]) -> bool:
    # Match the concatenated hashes: one match per hash would take longer than all other checks.
    if not column:
        return True
    return set(map(type, column)) == {str} and set(map(len, column)) == {16} and bool(_HEX.fullmatch("".join(column)))


def _fate(row: Any) -> RowFate:
    key, number, fate, reason, tries, content = row
    if fate not in get_args(Fate):
        raise ValueError(f"rows: expected one of {get_args(Fate)}, got {shown(fate)}")
    if len(_text(key, "rows: key")) > MAX_ROW_KEY:
        raise ValueError(f"rows: expected keys of at most {MAX_ROW_KEY} characters, got one of {len(key)}")
    if number is not None:
        _count(number, "rows: row", _LARGEST_ROW)
    return RowFate(
        key,
        number,
        fate,
        _text(reason, "rows: reason"),
        _count(tries, "rows: tries", _LARGEST_ROW),
        _text(content, "rows: content"),
        stored=True,
    )


def _lost_part(name: Any) -> str:
    if not _PART.fullmatch(_text(name, "void")) or parse_part_name(name) is None:
        raise ValueError(f"void: expected names of parts, got {shown(name)}")
    return str(name)


def _count(value: Any, name: str, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{name}: expected a string, got {shown(value)}")
    return value
