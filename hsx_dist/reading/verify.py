"""Every byte of a run against its checksums, every part against its receipt, every count against the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hsx_dist.errors import FormatError, HsxError, NotFound, StoreError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.container import Part, SegmentInfo
from hsx_dist.format.manifest import Manifest, Receipt, SegmentProof, token_hash
from hsx_dist.format.runs import check_receipts, count, load_manifest, read_complete, read_run
from hsx_dist.store import ObjectInfo, Store

# Exponent bits all set: infinite or not a number.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and with which part or receipt (``""``: the run itself)."""

    part: str
    message: str


@dataclass(slots=True)
class VerifyReport:
    """``parts`` and ``bytes`` read, whole ``samples`` in the manifest, ``problems`` found.

    Not problems, but good to know: ``non_finite`` and ``all_zero`` count layers of segments with a NaN or an infinity,
    and with nothing but zeros.
    """

    parts: int = 0
    samples: int = 0
    bytes: int = 0
    non_finite: int = 0
    all_zero: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_run(store: Store, *, on_part: Callable[[str, Sequence[Problem]], None] | None = None) -> VerifyReport:
    """Read and check everything; holds one part at a time. ``on_part`` is called after each with its problems.

    Raises:
        RunError: there is no run.
        StoreError: the store's, unless it only says that a part is missing.
    """
    report = VerifyReport()
    try:
        read_run(store)
        manifest = load_manifest(store)
    except StoreError as e:
        if not isinstance(e, NotFound):
            raise
        report.problems.append(Problem("", str(e)))
        return report
    except FormatError as e:
        report.problems.append(Problem("", str(e)))
        return report
    for name in sorted(manifest.parts):
        found = [Problem(name, message) for message in _check_part(store, manifest.parts[name], report)]
        report.problems.extend(found)
        if on_part is not None:
            on_part(name, found)
    report.samples = len(manifest.samples)
    try:
        report.problems.extend(Problem(name, message) for name, message in check_receipts(store))
    except FormatError as e:
        report.problems.append(Problem("", str(e)))
    report.problems.extend(Problem("", message) for message in _check_counts(store, manifest))
    return report


def _check_part(store: Store, receipt: Receipt, report: VerifyReport) -> Iterator[str]:
    """What is wrong with a part; nothing after the first sign that its bytes changed, but for where that is."""
    name = receipt.part or ""
    report.parts += 1
    try:
        data = store.get(name)
    except NotFound as e:
        yield str(e)
        return
    report.bytes += len(data)
    if len(data) != receipt.size:
        yield f"expected {receipt.size} bytes, as its receipt says, got {len(data)}"
    crc = crc32c_hex(crc32c(data))
    if crc != receipt.crc32c:
        yield f"expected crc32c {receipt.crc32c}, as its receipt says, got {crc}: the bytes changed"
    try:
        part = Part.open(_Bytes(store.url, data), name, header_bytes=receipt.header_bytes, size=len(data))
    except HsxError as e:
        yield str(e)
        return
    if len(part.segments) != len(receipt.segments):
        yield f"expected {len(receipt.segments)} segments, as its receipt says, got {len(part.segments)}"
        return
    for proof in receipt.segments:
        try:
            yield from _check_segment(part, proof, report)
        except HsxError as e:
            yield str(e)


def _check_segment(part: Part, proof: SegmentProof, report: VerifyReport) -> Iterator[str]:
    if not 0 <= proof.slot < len(part.segments):
        yield f"expected a segment at place {proof.slot}, as its receipt says, got {len(part.segments)} segments"
        return
    info = part.segments[proof.slot]
    if info.segment != proof.segment:
        yield f"expected {proof.segment} at place {proof.slot}, as its receipt says, got {info.segment}"
        return
    got = token_hash(part.token_ids(proof.slot))
    if got != proof.token_hash:
        yield f"{proof.segment.key!r}: expected token ids of hash {proof.token_hash}, got {got}"
    raw = info.segment.num_tokens * info.num_layers * info.row_bytes
    if raw != proof.raw_bytes:
        yield f"{proof.segment.key!r}: expected {proof.raw_bytes} raw bytes, as its receipt says, got {raw}"
    _count_values(part, proof.slot, info, report)


def _count_values(part: Part, i: int, info: SegmentInfo, report: VerifyReport) -> None:
    non_finite, not_zero = set(), set()
    exponent, magnitude = _EXPONENT[info.dtype], ~_SIGN[info.dtype] & (2 * _SIGN[info.dtype] - 1)
    for k, x in part.scan(i):
        bits = np.bitwise_and(x, x.dtype.type(magnitude))
        largest = int(bits.max())
        if largest >= exponent:
            non_finite.add(k)
        if largest:
            not_zero.add(k)
    report.non_finite += len(non_finite)
    report.all_zero += info.num_layers - len(not_zero)


def _check_counts(store: Store, manifest: Manifest) -> Iterator[str]:
    yield from manifest.conflicts
    try:
        complete = read_complete(store)
    except FormatError as e:
        yield str(e)
        return
    if complete is None:
        return
    here = count(Manifest(r for r in manifest.receipts if r.attempt <= complete["attempt"]))
    for name, told in complete["counts"].items():
        if name in here and here[name] != told:
            yield f"complete.json: expected {told} {name}, its receipts make {here[name]}"


class _Bytes:
    """A source whose one object was fetched already."""

    def __init__(self, url: str, data: bytes):
        self.url: str = url
        self._data = memoryview(data)

    def head(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, len(self._data))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:  # noqa: ARG002
        return [self._data[a:b] for a, b in ranges]
