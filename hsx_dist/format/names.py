"""The names of a run's objects: building and parsing them."""

from __future__ import annotations

import re

from hsx_dist.errors import FormatError
from hsx_dist.page import HIDDEN_STATES

__all__ = [
    "ATTEMPT_DIGITS",
    "CHECK",
    "LARGEST_NUMBER",
    "MAX_KEY",
    "MAX_LABEL",
    "WRITER",
    "attempt_name",
    "closed_name",
    "compacted_name",
    "complete_name",
    "heartbeat_name",
    "parse_part_name",
    "parse_receipt_name",
    "part_name",
    "receipt_name",
    "statistics_name",
]

#: Characters of a sample's key. It is in every receipt, header and log line of the sample.
MAX_KEY = 1024
#: Characters of an input file's label. A file name has at most 1,024 bytes, and an invalid byte takes six characters.
MAX_LABEL = 8192
#: The largest attempt, and the largest receipt number of a writer: nine digits.
LARGEST_NUMBER = 999_999_999
#: Names of writers.
WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
#: The result of comparing samples with the model (``check_samples``).
CHECK = "check.json"
#: Numbers from 1 on, as ``_number`` writes them. ``\\d`` would also match digits of other scripts, and any length.
ATTEMPT_DIGITS, _SEQ_DIGITS = "(?!0000)[0-9]{4}|[1-9][0-9]{4,8}", "(?!000000)[0-9]{6}|[1-9][0-9]{6,8}"
_RECEIPT = re.compile(rf"manifest/({ATTEMPT_DIGITS})/({WRITER.pattern})/({_SEQ_DIGITS})\.json")
_PART = re.compile(rf"data/part-({ATTEMPT_DIGITS})-({WRITER.pattern})-({_SEQ_DIGITS})(?:=[^/]*)?\.safetensors")


def attempt_name(attempt: int) -> str:
    """``attempts/0001.json``: the holder of the attempt."""
    return f"attempts/{_number(attempt, 4)}.json"


def heartbeat_name(attempt: int) -> str:
    """``attempts/0001.heartbeat.json``: a value that changes while the attempt's holder lives."""
    return f"attempts/{_number(attempt, 4)}.heartbeat.json"


def closed_name(attempt: int) -> str:
    """``attempts/0001.closed.json``: a writer of the attempt that finds this object stores no more receipts."""
    return f"attempts/{_number(attempt, 4)}.closed.json"


def complete_name(attempt: int) -> str:
    """``attempts/0001.complete.json``: the attempt accounted for every row. Each attempt has a separate object, so that
    an earlier attempt that resumes after a pause cannot replace a later one's."""
    return f"attempts/{_number(attempt, 4)}.complete.json"


def receipt_name(attempt: int, writer: str, seq: int) -> str:
    """``manifest/0001/WRITER/000001.json``"""
    return f"manifest/{_number(attempt, 4)}/{_writer(writer)}/{_number(seq, 6)}.json"


def part_name(attempt: int, writer: str, seq: int, sample: str = "") -> str:
    """``data/part-0001-WRITER-000001.safetensors``; for a part of one ``sample``, with ``=SAMPLE`` before the ending.

    No two parts of a run share a name, even with equal content: a writer that resumes after a pause cannot replace
    another writer's part.
    """
    return f"data/part-{_number(attempt, 4)}-{_writer(writer)}-{_number(seq, 6)}{sample and f'={sample}'}.safetensors"


def compacted_name(attempt: int) -> str:
    """``manifest/compacted-0001.jsonl.zst``: all receipts in effect when the attempt completed the run."""
    return f"manifest/compacted-{_number(attempt, 4)}.jsonl.zst"


def statistics_name(layer: int, point: str = HIDDEN_STATES) -> str:
    """``statistics/0015.json``: the result of ``hsx stats`` for a layer of hidden states. ``statistics/q-0015.json``:
    for another point."""
    return f"statistics/{'' if point == HIDDEN_STATES else f'{point}-'}{layer:04d}.json"


def parse_receipt_name(name: str) -> tuple[int, str, int] | None:
    """``(attempt, writer, seq)`` of a name from ``receipt_name``; ``None`` for any other name."""
    return _parsed(_RECEIPT.fullmatch(name))


def parse_part_name(name: str) -> tuple[int, str, int] | None:
    """``(attempt, writer, seq)`` of a name from ``part_name``; ``None`` for any other name."""
    return _parsed(_PART.fullmatch(name))


def _parsed(found: re.Match[str] | None) -> tuple[int, str, int] | None:
    return None if found is None else (int(found[1]), found[2], int(found[3]))


def _number(n: int, digits: int) -> str:
    if n < 1:
        raise ValueError(f"expected a number from 1 on, got {n}")
    if n > LARGEST_NUMBER:
        raise FormatError(
            f"expected attempts and receipts to be numbered up to {LARGEST_NUMBER}, got {n}. Remove the object with "
            f"number {n - 1} in its name"
        )
    return f"{n:0{digits}d}"


def _writer(name: str) -> str:
    if not WRITER.fullmatch(name):
        raise ValueError(
            f"expected a writer's name of at most 128 letters, digits, '_', '-', '.', got {name!r}. "
            "Make one with object_name"
        )
    return name
