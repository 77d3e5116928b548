"""Receipts: the proof that a part is stored whole, and the fate of rows that left no sample.

Stored as ``{"crc32c":"8 hex digits","receipt":BODY}``, the checksum being that of the bytes of BODY. Unknown members
of the body are for later versions, and ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from operator import le, lt
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.page import Segment

_FORMAT = "hsx-receipt/1"
_BEFORE_CRC, _AFTER_CRC = b'{"crc32c":"', b'","receipt":'
_HEADER = len(_BEFORE_CRC) + 8 + len(_AFTER_CRC)
# A table, not objects: a receipt may prove tens of thousands of segments.
_SEGMENT_COLUMNS = [
    "key", "index", "start", "stop", "total", "slot", "token_hash", "raw_bytes", "stored_bytes", "row", "sample_hash"
]  # fmt: skip
_ROW_COLUMNS = ["key", "row", "fate", "reason", "tries", "content"]
_HEX, _HEX8, _HEX16 = (re.compile(f"[0-9a-f]{n}") for n in ("*", "{8}", "{16}"))
_LARGEST = 2**62
_Json = dict[str, Any]
#: A segment as a receipt stores it: the values of ``_SEGMENT_COLUMNS``.
SegmentRow = list[Any]


@dataclass(frozen=True, slots=True)
class SegmentProof:
    """One segment of a stored part.

    ``slot``: its position among the part's segments. ``token_hash``: ``token_hash`` of its ids. ``raw_bytes`` and
    ``stored_bytes``: size of its states before and after encoding. ``row``: the input row it came from, if known.
    ``sample_hash``: ``token_hash`` of all ids of the sample, if known: only segments that agree in it belong together.
    """

    segment: Segment
    slot: int
    token_hash: str
    raw_bytes: int
    stored_bytes: int
    row: int | None = None
    sample_hash: str = ""


@dataclass(frozen=True, slots=True)
class RowFate:
    """A row that has no sample, and why: ``refused`` rows cannot have one, ``failed`` ones may be tried again.

    ``withdrawn`` takes back an earlier fate of the key: the row was corrected. ``content``: hash of the row's content
    where it could be read, so that a corrected row is known from the one that was refused; else empty.
    """

    key: str
    row: int | None
    fate: Literal["refused", "failed", "withdrawn"]
    reason: str
    tries: int
    content: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt number ``seq`` (from 1, without gaps) of one writer in one attempt.

    ``part``: the stored object's name, or ``None`` when the receipt tells of rows only; then ``size``, ``header_bytes``
    and ``raw_bytes`` are 0. ``crc32c``: eight hex digits, over the whole object of ``size`` bytes, whose first
    ``header_bytes`` are its header. ``created``: ISO 8601, UTC.
    """

    attempt: int
    writer: str
    seq: int
    part: str | None
    size: int
    crc32c: str
    header_bytes: int
    raw_bytes: int
    segments: tuple[SegmentProof, ...]
    rows: tuple[RowFate, ...]
    created: str

    @property
    def id(self) -> tuple[int, str, int]:
        """What no two receipts of a run share."""
        return self.attempt, self.writer, self.seq

    def to_json(self) -> bytes:
        """The receipt as it is stored: one line, the same bytes for the same receipt."""
        body = {
            "format": _FORMAT,
            "attempt": self.attempt,
            "writer": self.writer,
            "seq": self.seq,
            "part": self.part,
            "size": self.size,
            "crc32c": self.crc32c,
            "header_bytes": self.header_bytes,
            "raw_bytes": self.raw_bytes,
            "segment_columns": _SEGMENT_COLUMNS,
            "segments": [_segment_row(p) for p in self.segments],
            "row_columns": _ROW_COLUMNS,
            "rows": [[r.key, r.row, r.fate, r.reason, r.tries, r.content] for r in self.rows],
            "created": self.created,
        }
        text = json.dumps(body, separators=(",", ":")).encode("ascii")
        return b"".join((_BEFORE_CRC, crc32c_hex(crc32c(text)).encode(), _AFTER_CRC, text, b"}"))

    @classmethod
    def from_json(cls, data: bytes, where: str = "receipt") -> Receipt:
        """The inverse of ``to_json``; ``where`` names the object in errors.

        Raises:
            IntegrityError: the checksum does not match.
            FormatError: it is no receipt, of a later format, or says what cannot be.
        """
        receipt, rows = read_table(data, where)
        return replace(receipt, segments=tuple(proof_of(row) for row in rows))


def read_table(data: bytes, where: str = "receipt") -> tuple[Receipt, list[SegmentRow]]:
    """The receipt without its segments, and these as the rows of a table; for readers of millions. Errors as
    ``Receipt.from_json``'s, which makes a ``SegmentProof`` of each row (``proof_of``)."""
    body = _open(data, where)
    try:
        return _receipt(body)
    except (KeyError, TypeError, ValueError) as e:
        what = f"no member {e}" if isinstance(e, KeyError) else str(e)
        raise FormatError(f"{where}: not a receipt: {what}. It was not written by hsx_dist, or is damaged") from e


def proof_of(row: SegmentRow) -> SegmentProof:
    """The proof that a row of ``read_table`` is."""
    key, index, start, stop, total, slot, token_hash, raw, stored, number, sample_hash = row
    return SegmentProof(Segment(key, index, start, stop, total), slot, token_hash, raw, stored, number, sample_hash)


def token_hash(token_ids: np.ndarray[Any, Any]) -> str:
    """16 hex digits of BLAKE2b over the ids as little-endian int64; ``token_ids``: integers ``[n]``."""
    ids = np.ascontiguousarray(token_ids, dtype="<i8")
    return hashlib.blake2b(ids.data, digest_size=8).hexdigest()


def _segment_row(p: SegmentProof) -> list[Any]:
    s = p.segment
    return [
        s.key, s.index, s.start, s.stop, s.total, p.slot, p.token_hash, p.raw_bytes, p.stored_bytes, p.row,
        p.sample_hash,
    ]  # fmt: skip


def _open(data: bytes, where: str) -> _Json:
    """The body, its checksum verified before anything of it is believed."""
    if not (data.startswith(_BEFORE_CRC) and data[_HEADER - len(_AFTER_CRC) : _HEADER] == _AFTER_CRC):
        raise FormatError(
            f"{where}: expected a receipt, which begins with {_BEFORE_CRC.decode()!r}, came {data[:24]!r}; it was not "
            "written by hsx_dist, or is damaged"
        )
    text, told = data[_HEADER:-1], data[len(_BEFORE_CRC) : len(_BEFORE_CRC) + 8]
    found = crc32c_hex(crc32c(text))
    if data[-1:] != b"}" or told != found.encode():
        raise IntegrityError(
            f"{where}: crc32c {told.decode('ascii', 'replace')} expected, {found} found: the receipt changed after it "
            "was written. Restore it; without it its part's samples count as missing"
        )
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not JSON: {e}") from e
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        came = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise FormatError(f"{where}: expected format {_FORMAT!r}, came {came!r}; update hsx_dist to read it")
    return body


def _receipt(b: _Json) -> tuple[Receipt, list[SegmentRow]]:
    for name, columns in (("segment_columns", _SEGMENT_COLUMNS), ("row_columns", _ROW_COLUMNS)):
        if b[name] != columns:
            raise ValueError(f"{name}: expected {columns}, came {b[name]}")
    part = b["part"]
    if part is not None:
        part = _text(part, "part")
        if part.startswith("/") or any(p in ("", ".", "..") for p in part.split("/")):
            raise ValueError(f"part: expected a relative name, came {part!r}")
    rows = b["segments"]
    if type(rows) is not list:
        raise ValueError(f"segments: expected a list, came a {type(rows).__name__}")
    if part is None and rows:
        raise ValueError("segments without a part")
    _check_rows(rows)
    receipt = Receipt(
        attempt=_count(b["attempt"], "attempt", 1),
        writer=_text(b["writer"], "writer"),
        seq=_count(b["seq"], "seq", 1),
        part=part,
        size=_count(b["size"], "size"),
        crc32c=_text(b["crc32c"], "crc32c"),
        header_bytes=_count(b["header_bytes"], "header_bytes"),
        raw_bytes=_count(b["raw_bytes"], "raw_bytes"),
        segments=(),
        rows=tuple(map(_fate, b["rows"])),
        created=_text(b["created"], "created"),
    )
    if not _HEX8.fullmatch(receipt.crc32c):
        raise ValueError(f"crc32c: expected 8 hex digits, came {receipt.crc32c!r}")
    if receipt.header_bytes > receipt.size:
        raise ValueError(f"header_bytes: expected at most size ({receipt.size}), came {receipt.header_bytes}")
    return receipt, rows


def _check_rows(rows: list[SegmentRow]) -> None:
    """``ValueError`` says which value of which row cannot be."""
    # Column by column in C: a run has millions of rows. The loop that finds the wrong one runs only when there is one.
    if not rows or _columns_hold(rows):
        return
    for slot, row in enumerate(rows):
        _check_row(row)
        if row[5] != slot:
            raise ValueError("slots: expected 0, 1, 2, …")


def _columns_hold(rows: list[SegmentRow]) -> bool:
    try:
        columns = list(zip(*rows, strict=True))
        key, _, start, stop, total, slot, token_hash, _, _, number, sample_hash = columns
    except (TypeError, ValueError):
        return False
    numbers = [column for i, column in enumerate(columns) if i in (1, 2, 3, 4, 5, 7, 8)]
    known = [n for n in number if n is not None]
    hashes = [*token_hash, *(h for h in sample_hash if h != "")]
    return (
        all(set(map(type, c)) == {int} and min(c) >= 0 and max(c) < _LARGEST for c in (*numbers, known) if c)
        and all(set(map(type, c)) == {str} for c in (key, hashes))
        and all(key)
        and slot == tuple(range(len(rows)))
        and all(map(lt, start, stop))
        and all(map(le, stop, total))
        and set(map(len, hashes)) == {16}
        and _HEX.fullmatch("".join(hashes)) is not None
    )


def _check_row(row: SegmentRow) -> None:
    key, index, start, stop, total, slot, token_hash, raw, stored, number, sample_hash = row
    for value in (index, start, stop, total, slot, raw, stored):
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise ValueError(f"segments: expected counts, came {value!r}")
    if not start < stop <= total:
        raise ValueError(f"segments: expected start < stop <= total, came {start}, {stop}, {total}")
    if type(key) is not str or not key or type(token_hash) is not str or not _HEX16.fullmatch(token_hash):
        raise ValueError(f"segments: expected a key and a hash of 16 hex digits, came {key!r}, {token_hash!r}")
    if number is not None:
        _count(number, "segments: row")
    if sample_hash != "" and (type(sample_hash) is not str or not _HEX16.fullmatch(sample_hash)):
        raise ValueError(f"segments: expected a sample's hash of 16 hex digits, or none, came {sample_hash!r}")


def _fate(row: Any) -> RowFate:
    key, number, fate, reason, tries, content = row
    if fate not in ("refused", "failed", "withdrawn"):
        raise ValueError(f"rows: expected refused, failed or withdrawn, came {fate!r}")
    if number is not None:
        _count(number, "rows: row")
    return RowFate(
        _text(key, "rows: key"),
        number,
        fate,
        _text(reason, "rows: reason"),
        _count(tries, "rows: tries"),
        _text(content, "rows: content"),
    )


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _LARGEST:
        raise ValueError(f"{name}: expected a whole number of at least {least}, came {value!r}")
    return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{name}: expected a string, came {value!r}")
    return value
