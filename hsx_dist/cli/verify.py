"""``hsx verify``: every byte of a run against its checksums, every count against its receipts."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.cli.status import FINE, FOUND_BAD
from hsx_dist.cli.tables import bytes_text, print_json
from hsx_dist.config import parse_storage_options
from hsx_dist.reading import open_run
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store


def run_verify(path: str, options: Sequence[str], *, as_json: bool) -> int:
    """Verify the run at ``path`` and print what was found; returns the exit status."""
    storage_options = parse_storage_options(options)
    open_run(path, storage_options=storage_options)  # "no run here" is wrong use, not damage
    report = verify_run(open_store(path, storage_options))
    if as_json:
        print_json(
            {
                "run": path,
                "ok": report.ok,
                "parts": report.parts,
                "samples": report.samples,
                "bytes": report.bytes,
                "problems": [{"part": p.part, "message": p.message} for p in report.problems],
            }
        )
    else:
        for problem in report.problems:
            print(f"BAD {problem.part or path}: {problem.message}")
        checked = f"{report.parts:,} parts, {report.samples:,} samples, {bytes_text(report.bytes)}"
        print(f"{'ok' if report.ok else f'{len(report.problems)} problems'}: {checked} read and checked in {path}")
    return FINE if report.ok else FOUND_BAD
