"""Verify a run: bytes against checksums, parts against receipts, counts against the manifest, and statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, HsxError, NotFound
from hsx_dist.format.codecs.base import blocks
from hsx_dist.format.container import Part, SegmentInfo
from hsx_dist.format.json_objects import shown
from hsx_dist.format.manifest import MOST_CONFLICTS, Manifest, Receipt, SegmentProof
from hsx_dist.format.place import Place, leftovers, open_place
from hsx_dist.format.runs import check_receipts, count, read_complete, receipts_after
from hsx_dist.page import FLOATS, HIDDEN_STATES, token_hash
from hsx_dist.reading.arguments import path_text
from hsx_dist.reading.column import LOSS_MASK, agrees, is_mean
from hsx_dist.reading.kept_parts import KeptParts
from hsx_dist.reading.missing import is_removed, missing_parts
from hsx_dist.reading.order import is_of_run
from hsx_dist.reading.part_stream import PartStream
from hsx_dist.reading.prefetch import read_ahead
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.select import key_hash
from hsx_dist.reading.statistics import damaged_statistics
from hsx_dist.reading.verify_report import MOST_OF_PART, TALLIED, Problem, VerifyReport, add_problem, name_bad
from hsx_dist.store import Store
from hsx_dist.store.output_file import regular_file, writable

# All exponent bits are set: infinity or NaN.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}


def verify_run(
    root: Store,
    *,
    on_part: Callable[[str, Sequence[Problem]], None] | None = None,
    workers: int = 4,
    sample: float = 1.0,
    seed: int = 0,
    resume: Path | None = None,
) -> VerifyReport:
    """Read and check a run. Memory: a block of 8 MiB and a chunk for each of ``workers`` threads.

    Args:
        root: the store at the run's path.
        on_part: called after each part with its problems, at most 22.
        sample: share of the parts to check, chosen by ``seed``. The manifest and its counts are always checked.
        resume: a file that records sound parts. Parts recorded there are not read again, even if they have changed
            since.

    Returns:
        The counts and problems. A damaged or missing object is a problem, not an error.

    Raises:
        RunError: there is no run, or it was removed during the check.
        StoreError: the store failed.
        ConfigError: an argument is wrong.

    Example:
        >>> from hsx_dist.reading import verify_run
        >>> from hsx_dist.store import open_store
        >>> verify_run(open_store("runs/demo")).ok
        True
    """
    if not 0 < sample <= 1:
        raise ConfigError(f"sample: expected a share of more than 0 and at most 1, such as 0.1, got {sample:g}")
    if workers < 1:
        raise ConfigError(f"workers: expected at least 1, got {workers}")
    known = _SoundParts(None if resume is None else Path(path_text("resume", resume)))
    report = VerifyReport()
    try:
        place = open_place(root)
    except (NotFound, FormatError) as e:
        add_problem(report, "", str(e))
        return report
    with place.reading():
        try:
            complete = read_complete(place.store)
            manifest, wrong = _read(place.store, complete)
        except (NotFound, FormatError) as e:
            add_problem(report, "", str(e))
        else:
            _check_run(place, complete, manifest, wrong, report, known, on_part, workers, sample, seed)
    return report


def _read(store: Store, complete: Mapping[str, Any] | None) -> tuple[Manifest, list[str]]:
    """Read the manifest, and compare the counts of the attempt that completed the run with its receipts.

    ``complete`` is read before the receipts. A later attempt may have receipts by then, which are read last. The counts
    are taken before those are added: a second manifest would take the same memory again.
    """
    manifest, here = Manifest(), dict[str, int]()
    for receipt in receipts_after(store, complete):
        if complete is not None and not here and receipt.attempt > complete["attempt"]:
            here = count(manifest)
        manifest.add(receipt)
    if complete is None:
        return manifest, []
    here = here or count(manifest)
    here.pop("conflicts", None)  # earlier versions counted rows that were computed again with other generated tokens
    told = {name: value for name, value in complete["counts"].items() if here.get(name, value) != value}
    return manifest, [
        f"completed attempt: expected {value} {name}, got {here[name]} in its receipts" for name, value in told.items()
    ]


def _check_run(
    place: Place,
    complete: Mapping[str, Any] | None,
    manifest: Manifest,
    wrong: Sequence[str],
    report: VerifyReport,
    known: _SoundParts,
    on_part: Callable[[str, Sequence[Problem]], None] | None,
    workers: int,
    sample: float,
    seed: int,
) -> None:
    store = place.store
    missing = set(missing_parts(store, manifest, place.version))

    def is_checked(name: str) -> bool:  # the listing shows missing parts without a read
        return sample == 1 or name in missing or key_hash(f"{seed},{name}", b"verify") < sample * 2**64

    names = list(filter(is_checked, sorted(manifest.parts)))
    todo = [n for n in names if n in missing or not known.take(place, manifest.parts[n], report)]
    damaged = set()
    # Each result has a few problems. The results of all parts may not fit the memory while one part is slow.
    for name, checked in read_ahead(
        lambda n: _check(place, manifest.parts[n]), ((n, 0) for n in todo), threads=workers, max_bytes=0
    ):
        tally = checked.result()
        report.add(tally)
        if not tally.ok:
            damaged.add(name)
        elif not tally.consumed:
            known.note(place, manifest.parts[name], tally)
        if on_part is not None:
            on_part(name, tally.problems)
    report.samples = len(manifest.samples)
    for name, message in _problems_of_run(place, complete, manifest, wrong, set(names) - damaged):
        add_problem(report, name, message)
    report.unlisted += max(manifest.num_conflicts - MOST_CONFLICTS, 0)


def _problems_of_run(
    place: Place, complete: Mapping[str, Any] | None, manifest: Manifest, wrong: Sequence[str], sound: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield name and error of problems that no check of a single part finds. ``sound``: parts without a problem."""
    store = place.store
    yield from _check_samples(store, manifest, sound)
    if complete is not None:
        yield from check_receipts(store, (r for r in manifest.receipts if r.attempt <= complete["attempt"]))
    yield from (("", message) for message in (*manifest.conflicts[:MOST_CONFLICTS], *wrong))
    yield from damaged_statistics(store)
    if not manifest.receipts:
        yield from (("", message) for message in _objects_of_no_run(place))


def _objects_of_no_run(place: Place) -> Iterator[str]:
    """Detect a ``run.json`` whose id changed: it describes an empty run. Earlier versions stored no checksum in it."""
    removed = leftovers(place.root, removed_only=True)
    for folder in leftovers(place.root):
        if folder not in removed:
            yield (
                f"expected the run's objects in {place.folder or 'manifest/, data/'}, got none there, but objects in "
                f"{folder or 'manifest/, data/'} that nothing names: run.json was deleted or changed. Restore it"
            )


class _SoundParts:
    """File of parts that were found sound, one line of JSON for each.

    A line counts only at its place, because a copy of the run has the same names. Lines of the first versions name
    neither place nor run: see ``is_of_run``.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._sound: dict[tuple[str | None, str | None, str, str], dict[str, int]] = {}
        if path is not None:
            try:
                with open(path, "a+", opener=regular_file) as f:
                    f.seek(0)
                    text = f.read()
                    if text and not text.endswith("\n"):
                        f.write("\n")
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(
                    f"resume: expected a file to record sound parts in, got {path}: {e}. Name another file"
                ) from e
            for line in text.splitlines():
                try:
                    d = json.loads(line)
                    self._sound[d.get("place"), d.get("run"), d["part"], d["crc32c"]] = {n: int(d[n]) for n in TALLIED}
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                    continue  # a killed process may have written an incomplete last line

    def take(self, place: Place, receipt: Receipt, report: VerifyReport) -> bool:
        names = [(place.root.url, place.id), *([(None, None)] if is_of_run(None, place) else [])]
        found = (self._sound.get((*name, receipt.part or "", receipt.crc32c)) for name in names)
        tally = next(filter(None, found), None)
        if tally is not None:
            report.add(
                VerifyReport(
                    parts=1, known=1, bytes=tally["bytes"], non_finite=tally["non_finite"], all_zero=tally["all_zero"]
                )
            )
        return tally is not None

    def note(self, place: Place, receipt: Receipt, tally: VerifyReport) -> None:
        if self._path is not None:
            line = {"place": place.root.url, "run": place.id, "part": receipt.part, "crc32c": receipt.crc32c}
            line |= {n: getattr(tally, n) for n in TALLIED}
            with writable(self._path, "file"), open(self._path, "a", opener=regular_file) as f:
                f.write(json.dumps(line) + "\n")


def _check(place: Place, receipt: Receipt) -> VerifyReport:
    name = receipt.part or ""
    try:
        for _ in range(2):  # a problem must show twice: the network may damage one answer
            tally = _check_part(place.store, name, receipt, place.layer_ids)
            if tally.ok:
                break
        return tally
    except NotFound:  # missing, or removed while it was read
        gone = VerifyReport(parts=1)
        if is_removed(place.store, name, place.version):
            gone.consumed = 1
        else:
            add_problem(
                gone,
                name,
                "expected the part that a receipt names, got no such object. Run the same extraction again: it "
                "computes the missing samples",
            )
        return gone


def _check_part(store: Store, name: str, receipt: Receipt, layer_ids: Sequence[int]) -> VerifyReport:
    """Check a part. If its checksum is wrong, later messages name the changed chunks."""
    report, content = VerifyReport(parts=1), VerifyReport()
    size = store.head(name).size
    if size != receipt.size:
        add_problem(report, name, f"expected {receipt.size} bytes, as its receipt says, got {size}")
    source = PartStream(store, name, size)
    for message in _check_content(source, receipt, layer_ids, content):
        add_problem(content, name, message, MOST_OF_PART)
    report.bytes = min(size, receipt.size)
    # A file of another size may be a hole of any length.
    if size == receipt.size and (crc := source.finish()) != receipt.crc32c:
        told = f"expected crc32c {receipt.crc32c}, as its receipt says, got {crc}: the bytes changed"
        add_problem(report, name, told)
    report.add(content)
    return report


def _check_content(
    source: PartStream, receipt: Receipt, layer_ids: Sequence[int], report: VerifyReport
) -> Iterator[str]:
    try:
        part = Part.open(source, source.name, header_bytes=receipt.header_bytes, size=source.size)
    except HsxError as e:
        yield str(e)
        return
    if len(part.segments) != len(receipt.segments):
        yield f"expected {len(receipt.segments)} segments, as its receipt says, got {len(part.segments)}"
        return
    # The table is the description's own: all token ids by slot, then the states of each segment in one piece. Nothing
    # is read twice, so that each request fetches a block.
    sound = []
    for proof in receipt.segments:
        try:
            messages = list(_check_segment(part, proof, layer_ids))
        except HsxError as e:
            messages = [str(e)]
        yield from messages
        if not messages:
            sound.append(proof.slot)
    for slot in part.stored_order(sound):
        try:
            _count_values(part, slot, part.segments[slot], report)
        except HsxError as e:
            yield str(e)


def _check_segment(part: Part, proof: SegmentProof, layer_ids: Sequence[int]) -> Iterator[str]:
    if not 0 <= proof.slot < len(part.segments):
        yield f"expected a segment at place {proof.slot}, as its receipt says, got {len(part.segments)} segments"
        return
    info = part.segments[proof.slot]
    if not agrees(info, proof):
        yield f"expected {proof.segment} at place {proof.slot}, as its receipt says, got {info.segment}"
        return
    key, got = shown(proof.segment.key), token_hash(part.token_ids(proof.slot))
    if got != proof.token_hash:
        yield f"{key}: expected token ids of hash {proof.token_hash}, got {got}"
    s = proof.segment
    is_whole = s.columns == 1 and s.num_tokens == s.total and not is_mean(info.segment.meta)
    if is_whole and proof.sample_hash not in ("", got):
        yield f"{key}: expected token ids of hash {proof.sample_hash}, the receipt's hash of the sample, got {got}"
    mask = part.attached_shape(proof.slot, LOSS_MASK)
    if mask not in (None, (s.total,)):
        yield f"{key}: expected a loss mask of {s.total} tokens, got shape {mask}"
    if layer_ids and info.segment.point == HIDDEN_STATES and (wrong := set(info.layer_ids) ^ set(layer_ids)):
        yield f"{key}: expected the layers of run.json, got others: only one of the two has layer {min(wrong)}"
    if info.raw_bytes != proof.raw_bytes:
        yield f"{key}: expected {proof.raw_bytes} raw bytes, as its receipt says, got {info.raw_bytes}"


def _count_values(part: Part, i: int, info: SegmentInfo, report: VerifyReport) -> None:
    if info.dtype not in FLOATS:  # ids: scanned only to check their checksums
        for _ in part.scan(i):
            pass
        return
    non_finite, not_zero = set(), set()
    exponent, magnitude = _EXPONENT[info.dtype], ~_SIGN[info.dtype] & (2 * _SIGN[info.dtype] - 1)
    for k, x in part.scan(i):
        # A copy of the whole chunk would double the memory.
        largest = max(int(np.bitwise_and(rows, x.dtype.type(magnitude)).max()) for rows in blocks(x))
        if largest >= exponent:
            non_finite.add(k)
        if largest:
            not_zero.add(k)
    report.non_finite += len(non_finite)
    report.all_zero += info.num_layers - len(not_zero)
    if non_finite or len(not_zero) < info.num_layers:
        name_bad(report, info.segment.key)


def _check_samples(store: Store, manifest: Manifest, sound: set[str]) -> Iterator[tuple[str, str]]:
    """Yield a part and an error for each sample in ``sound`` parts whose segments do not fit together.

    Receipts do not name points and layers, so that checking each part against its receipt cannot find this.
    """

    def opened(name: str) -> Part:
        receipt = manifest.parts[name]
        return Part.open(store, name, header_bytes=receipt.header_bytes, size=receipt.size)

    kept = KeptParts()

    for key, places, _ in manifest.several():
        parts = {manifest.at(place)[0] for place in places}
        if len(places) > 1 and parts <= sound:
            record = manifest.samples[key]
            try:
                Sample(record.key, record.segments, lambda name: kept.get(name, opened), store.url).check()
            except NotFound:
                continue  # removed after use
            except HsxError as e:
                yield min(parts), str(e)
