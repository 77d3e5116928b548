"""``hsx status``: the outcomes of a run's rows, while it is written and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hsx_dist.cli.exit_codes import FINE, FOUND_BAD
from hsx_dist.cli.tables import print_facts
from hsx_dist.config import parse_storage_options
from hsx_dist.observe.console import print_json
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading.status import RunStatus, run_status
from hsx_dist.store import open_store


def print_status(path: str, options: Sequence[str], *, as_json: bool) -> int:
    """Print the status of the run at ``path``. Return the exit status: 1 if rows are missing or in conflict."""
    status = run_status(open_store(path, parse_storage_options(options)))
    if as_json:
        print_json(dataclasses.asdict(status))
    else:
        print_facts(_facts(status))
    return FINE if status.ok else FOUND_BAD


def _facts(status: RunStatus) -> list[tuple[str, object]]:
    rows, totals = status.rows, status.totals
    of = "" if rows["total"] is None else f" of {rows['total']:,}"
    sign = f", last heartbeat {status.last_sign}" if status.last_sign else ""
    facts: list[tuple[str, object]] = [
        ("run", status.url),
        ("state", f"{status.state} (attempt {status.attempt}{sign})"),
        ("stored", f"{rows['stored']:,}{of} rows, {totals.tokens:,} tokens"),
        *((name, f"{rows[name]:,} rows") for name in ("refused", "failed", "poison")),
        ("open", "not counted yet" if rows["open"] is None else f"{rows['open']:,} rows"),
        ("parts", f"{totals.parts:,}, {bytes_text(totals.part_bytes)} ({bytes_text(totals.raw_bytes)} raw)"),
    ]
    if status.progress:
        told = {name: float(status.progress.get(name) or 0) for name in ("replicas", "under_way", "tokens_per_second")}
        facts.append(
            (
                "now",
                f"{told['replicas']:,.0f} replicas ready, {told['under_way']:,.0f} rows under way, "
                f"{told['tokens_per_second']:,.0f} tokens/s"
                + (f", paused by {status.progress['paused']}" if status.progress.get("paused") else ""),
            )
        )
    for kind, reasons in status.reasons.items():
        facts += [(f"{count:,} {kind}", reason) for reason, count in reasons.items()]
    if status.missing_parts:
        facts.append(("lost", f"{status.missing_parts:,} parts; the same extraction computes their samples again"))
    if status.conflicts:
        facts.append(("conflicts", f"{status.conflicts}; hsx show lists them"))
    return facts
