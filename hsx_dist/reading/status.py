"""Status of a run from the store alone, at any time: the fates of its rows, and whether a driver works on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hsx_dist.format.compacted import read_compacted
from hsx_dist.format.manifest import Manifest, Totals
from hsx_dist.format.place import Place, open_place
from hsx_dist.format.runs import receipts_after
from hsx_dist.reading.liveness import OBSERVE_SECONDS, observe
from hsx_dist.reading.missing import missing_parts
from hsx_dist.store import Store

#: Maximum number of distinct reasons. Further reasons are counted together.
_REASONS = 20


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run.

    - ``state``: as in ``Tenure``.
    - ``rows``: ``total`` and ``open`` are ``None`` until a driver has counted its input. ``failed`` does not count
      ``poison``.
    - ``missing_parts``: lost parts that receipts name. A resume computes their samples again.
    - ``reasons``: number of rows by reason. Digits in a reason are replaced by ``#``.
    - ``progress``: the progress in the driver's last heartbeat.
    """

    url: str
    state: str
    attempt: int
    rows: dict[str, int | None]
    totals: Totals
    conflicts: int
    missing_parts: int = 0
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    last_sign: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the run needs no attention."""
        bad = self.rows["failed"] or self.rows["poison"] or self.conflicts or self.missing_parts
        return not bad and self.state not in ("silent", "failed")


def run_status(
    root: Store, *, observe_seconds: float = OBSERVE_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> RunStatus:
    """The status of the run at ``root``. Watches the heartbeat for up to ``observe_seconds``: see ``observe``.

    Raises:
        RunError: there is no run, or it is being removed.
        FormatError: the manifest is damaged.
    """
    place = open_place(root)
    with place.reading():
        return _account(place, observe_seconds, sleep)


def _account(place: Place, observe_seconds: float, sleep: Callable[[float], None]) -> RunStatus:
    store = place.store
    found = observe(store, observe_seconds, sleep=sleep)
    # Later receipts are of an attempt that was taken since. The state ``complete`` is not that attempt's.
    over = found.complete
    manifest = Manifest(receipts_after(store, found.completed) if over is None else read_compacted(store, over))
    progress = dict(found.heartbeat.get("progress") or {})
    total = progress.get("rows") if over is None else over["summary"].get("rows")
    poison = sum(fate.fate == "poison" for fate in manifest.failed.values())
    ended = {
        "stored": len(manifest.samples),
        "refused": len(manifest.refused),
        "failed": len(manifest.failed) - poison,
        "poison": poison,
    }
    left = None if total is None else max(int(total) - sum(ended.values()), 0)
    return RunStatus(
        url=place.root.url,
        state=found.state,
        attempt=found.attempt,
        rows={"total": total, **ended, "open": left},
        totals=manifest.totals(),
        conflicts=manifest.num_conflicts,
        missing_parts=len(missing_parts(store, manifest, place.version)),
        reasons={
            "refused": _reasons(fate.reason for fate in manifest.refused.values()),
            "failed": _reasons(fate.reason for fate in manifest.failed.values()),
        },
        progress=progress if found.state == "running" else {},
        last_sign=found.heartbeat.get("time"),
    )


def _reasons(reasons: Any) -> dict[str, int]:
    """Counts by reason, most frequent first. Digits are masked, since they differ between rows of the same reason."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        counts["".join("#" if c.isdigit() else c for c in reason)[:300]] += 1
    common = counts.most_common(_REASONS)
    rest = counts.total() - sum(n for _, n in common)
    return {**dict(common), **({"other reasons": rest} if rest else {})}
