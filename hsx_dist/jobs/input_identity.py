"""The identity of a run's input, so that a resume with another input is refused.

It consists of the first rows. It has no paths: data moves between machines, and each submitted job has another working
folder. It has no number of rows, as a run may be extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from hsx_dist.errors import RunMismatch
from hsx_dist.format.manifest import Manifest
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.accounting import Rows

#: Number of first rows in ``run.json``.
FIRST_ROWS = 16


def first_rows(rows: Rows) -> dict[str, str]:
    """Key → content hash of the first usable rows."""
    return {row.key: row.content for row in islice((r for r in rows() if isinstance(r, Row)), FIRST_ROWS)}


def check_same_input(url: str, run: Mapping[str, Any], manifest: Manifest, rows: Rows) -> None:
    """Compare the input with the first rows in ``run.json`` of the run at ``url``. Only stored rows count, as a refused
    row may be corrected. Reads the input until all of them are found.

    Raises:
        RunMismatch: a stored row has other content now, or none of them is in the input.
    """
    known = {k: c for k, c in dict(run.get("first_rows") or {}).items() if k in manifest.samples}
    wanted = dict(known)
    for row in rows() if wanted else ():
        content = wanted.pop(row.key, None)
        if content is not None and isinstance(row, Row) and row.content != content:
            raise RunMismatch(
                f"{url}: expected the input of the stored run, got row {row.key!r} with other content than the stored "
                "one. Use the same input, or choose another output"
            )
        if not wanted:
            return
    if known and len(wanted) == len(known):
        raise RunMismatch(
            f"{url}: expected the input of the stored run, which began with row {next(iter(known))!r}, got one without "
            "any of its first rows. Use the same input, or choose another output"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[tuple[str, Any, Any]]:
    """Settings that differ: name (``input.text``) and both values. None: not set."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*before, *now}):
        had, has = before.get(name), now.get(name)
        if isinstance(had, Mapping) and isinstance(has, Mapping):
            found += differences(had, has, f"{within}{name}.")
        elif had != has:
            found.append((f"{within}{name}", had, has))
    return found


def run_seed(run: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> str:
    """The seed from which the rows' seeds are derived: the user's, else the run's id."""
    given = sampling_params.get("seed")
    return f"seed {given}" if given is not None else str(run.get("id") or run.get("created") or "")
