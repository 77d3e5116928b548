"""``hsx verify``: every byte of a run against its checksums, every count against its receipts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsx_dist.cli.status import FINE, FOUND_BAD
from hsx_dist.cli.tables import bytes_text, print_json
from hsx_dist.config import parse_storage_options
from hsx_dist.reading.verify import Problem, verify_run
from hsx_dist.store import open_store


def run_verify(
    path: str,
    options: Sequence[str],
    *,
    workers: int = 4,
    sample: float = 1.0,
    seed: int = 0,
    resume: str | None = None,
    as_json: bool,
) -> int:
    """Verify the run at ``path`` and print what was found, bad parts as soon as they are; returns the exit status."""
    store = open_store(path, parse_storage_options(options))
    report = verify_run(
        store,
        on_part=None if as_json else _print_problems,
        workers=workers,
        sample=sample,
        seed=seed,
        resume=None if resume is None else Path(resume),
    )
    if as_json:
        print_json(
            {
                "run": path,
                "ok": report.ok,
                "parts": report.parts,
                "known": report.known,
                "consumed": report.consumed,
                "samples": report.samples,
                "bytes": report.bytes,
                "non_finite": report.non_finite,
                "all_zero": report.all_zero,
                "problems": [{"part": p.part, "message": p.message} for p in report.problems],
            }
        )
        return FINE if report.ok else FOUND_BAD
    _print_problems("", [p for p in report.problems if not p.part])
    for count, what in ((report.non_finite, "values that are not finite"), (report.all_zero, "nothing but zeros")):
        if count:
            print(f"note: {count:,} layers of samples have {what}")
    for count, what in ((report.known, "were noted as sound before"), (report.consumed, "were used and removed")):
        if count:
            print(f"note: {count:,} parts {what}")
    checked = f"{report.parts:,} parts, {report.samples:,} samples, {bytes_text(report.bytes)}"
    print(f"{'ok' if report.ok else f'{len(report.problems)} problems'}: {checked} read and checked in {path}")
    return FINE if report.ok else FOUND_BAD


def _print_problems(part: str, problems: Sequence[Problem]) -> None:
    for problem in problems:
        print(f"BAD {part or 'the run'}: {problem.message}", flush=True)
