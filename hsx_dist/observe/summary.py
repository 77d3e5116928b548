"""A summary of a run in a few lines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from rich.table import Table

from hsx_dist.format.manifest import Manifest
from hsx_dist.observe.console import Console
from hsx_dist.observe.progress import Progress
from hsx_dist.observe.units import bytes_text

#: Prefixes of the reasons with which a limit ends a run.
_LIMITS = ("max_rows", "max_bytes", "deadline")


@dataclass(slots=True)
class RunSummary:
    """A run's totals, from its receipts."""

    url: str
    samples: int
    tokens: int
    parts: int
    raw_bytes: int
    stored_bytes: int
    refused: int
    failed: int
    conflicts: int
    stopped: str = ""  # why it ended before its last row: a limit's name and the reached value, or another reason
    check_passed: bool | None = None  # None: nothing was compared

    @classmethod
    def of(cls, url: str, manifest: Manifest, *, stopped: str = "") -> RunSummary:
        """Totals over the readable samples and their parts."""
        totals = manifest.totals()
        return cls(
            url=url,
            samples=totals.samples,
            tokens=totals.tokens,
            parts=totals.parts,
            raw_bytes=totals.raw_bytes,
            stored_bytes=totals.part_bytes,
            refused=len(manifest.refused),
            failed=len(manifest.failed),
            conflicts=manifest.num_conflicts,
            stopped=stopped,
        )

    @property
    def ratio(self) -> float:
        """Raw bytes of the states per stored byte. Stored bytes include token ids and headers."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 0.0

    @property
    def exit_status(self) -> int:
        """0 if every row is stored or refused (but not all are refused), or if a configured limit ended the run. The
        comparison, if any, must also have passed. Otherwise 1."""
        nothing = self.refused and not self.samples  # no row was usable: the configuration is probably wrong
        stopped = self.stopped and not self.stopped.startswith(_LIMITS)
        bad = self.failed or self.conflicts or stopped or self.check_passed is False or nothing
        return 1 if bad else 0


def print_summary(summary: RunSummary, manifest: Manifest, console: Console, computed: Progress | None) -> None:
    """Print a table, three samples with their places in the store, and the refused and failed rows."""
    table = Table(title=f"run {summary.url}", title_justify="left", show_header=False)
    table.add_row("rows", f"{summary.samples:,} stored, {summary.refused:,} refused, {summary.failed:,} failed")
    table.add_row("tokens", f"{summary.tokens:,}")
    table.add_row("parts", f"{summary.parts:,}")
    table.add_row("raw", bytes_text(summary.raw_bytes))
    table.add_row("stored", bytes_text(summary.stored_bytes))
    table.add_row("ratio", f"{summary.ratio:.3f}")
    if computed is not None:
        rate = computed.tokens / max(computed.seconds, 1e-9)
        table.add_row("speed", f"{rate:,.0f} tokens/s over {computed.seconds:.1f} s (engines ready to last receipt)")
    console.print(table)
    for key in islice(manifest.samples, 3):
        sample = manifest.samples[key]
        where = ", ".join(f"{proof.part} [{proof.slot}]" for proof in sample.segments)
        console.print(f"  {key}: {sample.num_tokens} tokens in {where}", soft_wrap=True)
    for fates in (manifest.refused, manifest.failed):
        for fate in list(fates.values())[:5]:
            console.print(f"  {fate.fate} {fate.key} (row {fate.row}): {fate.reason}", soft_wrap=True)
        if len(fates) > 5:
            console.print(f"  … and {len(fates) - 5} more")
    for conflict in manifest.conflicts:
        console.print(f"  conflict: {conflict}", soft_wrap=True)
