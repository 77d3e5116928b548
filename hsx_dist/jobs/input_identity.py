"""What a run remembers of its input, so that a resume with another one is refused.

Where the input lies is no part of it: data moves between machines, and a submitted job's own files lie in another
folder each time. Nor is how many rows are taken. What its first rows are, is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from hsx_dist.errors import RunMismatch
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.inputs.rows import Row

#: How many rows are remembered, in ``run.json``.
FIRST_ROWS = 16

Rows = Callable[[], Iterator[Row | RowFate]]


def first_rows(rows: Rows) -> dict[str, str]:
    """Key → hash of the content, of the first usable rows."""
    return {row.key: row.content for row in islice((r for r in rows() if isinstance(r, Row)), FIRST_ROWS)}


def check_same_input(url: str, run: Mapping[str, Any], manifest: Manifest, rows: Rows) -> None:
    """Hold the input against what the run at ``url`` (its ``run.json``) began with. Only rows that are stored count:
    one that was refused may be corrected. Reads on until all of them have come.

    Raises:
        RunMismatch: a stored row has another content now, or none of them is there.
    """
    known = {k: c for k, c in dict(run.get("first_rows") or {}).items() if k in manifest.samples}
    wanted = dict(known)
    for row in rows() if wanted else ():
        content = wanted.pop(row.key, None)
        if content is not None and isinstance(row, Row) and row.content != content:
            raise RunMismatch(
                f"the run at {url} was made with another input (row {row.key!r} had other content when its states were "
                "stored). Choose another output, or the same input"
            )
        if not wanted:
            return
    if known and len(wanted) == len(known):
        raise RunMismatch(
            f"the run at {url} was made with another input (it began with row {next(iter(known))!r}, and none of its "
            "first rows is in this one). Choose another output, or the same input"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[tuple[str, Any, Any]]:
    """Settings that are not the same in both: name (``input.text``), and the value of each; None stands for none."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*before, *now}):
        had, has = before.get(name), now.get(name)
        if isinstance(had, Mapping) and isinstance(has, Mapping):
            found += differences(had, has, f"{within}{name}.")
        elif had != has:
            found.append((f"{within}{name}", had, has))
    return found


def run_seed(run: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> str:
    """What the seeds of a run's rows are made of: the seed that the user gave, else the run's own identity."""
    given = sampling_params.get("seed")
    return f"seed {given}" if given is not None else str(run.get("id") or run.get("created") or "")
