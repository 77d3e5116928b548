"""Facts about a run from its attempts, receipts and headers of parts. Reads no states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from hsx_dist.config.secrets import hide_secrets
from hsx_dist.errors import NotFound
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.runs import attempts_of, read_attempt, read_complete, read_heartbeat
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import Run
from hsx_dist.reading.missing import missing_parts, stored_parts
from hsx_dist.store import Store
from hsx_dist.text import bounded

#: Number of parts whose headers are read for the sizes of layers.
PARTS_LOOKED_AT = 64
#: The most reasons of refused, failed and poison rows that are shown.
REASONS_SHOWN = 20
#: The numbers of a heartbeat's progress that the report shows. Only these are kept: a run may have many attempts, and
#: a decoded heartbeat takes many times its bytes.
_PROGRESS = ("seconds", "tokens", "engines_timestamp")
_COUNTED = (
    "engine_seconds",
    "copy_seconds",
    "store_wait_seconds",
    "idle_seconds",
    "encode_seconds",
    "put_seconds",
    "room_wait_seconds",
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One driver's attempt: where and when it began, how it ended, and its numbers.

    A number is 0 if the attempt did not store it. ``counted``: sums over all replicas or writers of the attempt.
    """

    number: int
    created: str
    host: str
    state: str
    progress: Mapping[str, float]
    counted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Stored bytes and tokens over time.

    One entry for each part, in the order of receipts, and an entry of zeros for each attempt's first engine: before it
    nothing can become durable. ``seconds``: since the run began.
    """

    seconds: np.ndarray[Any, Any]  # float64 [P]
    attempts: np.ndarray[Any, Any]  # int64 [P]
    tokens: np.ndarray[Any, Any]  # int64 [P]
    raw_bytes: np.ndarray[Any, Any]  # int64 [P]
    stored_bytes: np.ndarray[Any, Any]  # int64 [P]


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Raw and stored bytes of one layer of a point in the inspected parts."""

    layer: int
    raw: int
    stored: int
    point: str = HIDDEN_STATES

    @property
    def name(self) -> str:
        return str(self.layer) if self.point == HIDDEN_STATES else f"{self.point} {self.layer}"


@dataclass(slots=True)
class RunFacts:
    """The facts on the page that need no states."""

    url: str
    complete: bool
    created: str  # the time in ``run.json``
    meaning: Mapping[str, Any]
    settings: Mapping[str, Any]
    attempts: list[Attempt]
    counts: dict[str, int]
    timeline: Timeline
    lengths: np.ndarray[Any, Any]  # int64 [samples]: tokens of each
    refused: list[tuple[str, int]]  # reason → rows, the most frequent reasons
    failed: list[tuple[str, int]]
    poison: list[tuple[str, int]]
    layer_sizes: list[LayerSize]
    codecs: dict[str, int] = field(default_factory=dict)  # name → number of inspected parts
    about: Mapping[str, Any] = field(default_factory=dict)  # origin, as described in the newest inspected part


def gather_facts(run: Run) -> RunFacts:
    """Read attempts, heartbeats, the manifest that ``run`` holds, and the headers of some parts.

    Raises:
        RunError: the run was removed since it was opened.
        StoreError, FormatError: an object cannot be read.
    """
    with run.place.reading():
        return _gather(run)


def _gather(run: Run) -> RunFacts:
    # Before an index is built, which frees the run's manifest: it would be read again, and held twice.
    manifest = run.manifest
    store, samples = run.store, manifest.samples.values()
    names = sorted({proof.part for s in samples for proof in s.segments})
    stored = stored_parts(store)
    gone = set(names) - stored
    lost = gone.intersection(missing_parts(store, manifest, run.version)) if gone else set()
    sizes, codecs, about = _layer_sizes(store, run, [name for name in names if name in stored])
    complete = read_complete(store)
    numbers = attempts_of(store)
    attempts = [_attempt(store, n, complete, numbers[-1]) for n in numbers]
    return RunFacts(
        url=run.url,
        complete=run.complete,
        created=str(run.info.get("created", "?")),
        meaning=_shown(run, "meaning"),
        settings=_shown(run, "settings"),
        attempts=attempts,
        counts={
            "samples": len(samples),
            "tokens": sum(s.num_tokens for s in samples),
            "parts": len(names),
            "removed_parts": len(gone - lost),
            "lost_parts": len(lost),
            "raw_bytes": sum(s.raw_bytes for s in samples),
            "stored_bytes": sum(manifest.parts[name].size for name in names),
            "refused": len(manifest.refused),
            "failed": len(manifest.failed),
        },
        timeline=_timeline(run, attempts),
        lengths=np.array([s.num_tokens for s in samples], np.int64),
        refused=_reasons(manifest.refused.values()),
        failed=_reasons(fate for fate in manifest.failed.values() if fate.fate != "poison"),
        poison=_reasons(fate for fate in manifest.failed.values() if fate.fate == "poison"),
        layer_sizes=sizes,
        codecs=codecs,
        about=about,
    )


def _shown(run: Run, name: str) -> Mapping[str, Any]:
    found = run.info.get(name)
    # Older versions recognised fewer credentials, and stored them.
    return hide_secrets(found) if isinstance(found, dict) else {}


def _attempt(store: Store, number: int, complete: Mapping[str, Any] | None, newest: int) -> Attempt:
    about, beat = read_attempt(store, number) or {}, read_heartbeat(store, number) or {}
    progress = beat.get("progress") or {}
    state = str(beat.get("state", "no heartbeat"))
    if complete is not None and complete["attempt"] == number:
        state = "complete"
    elif state == "running" and number < newest:
        state = "vanished"  # it did not record its end, and another attempt took over
    return Attempt(
        number,
        bounded(about.get("created", "?")),
        bounded(about.get("host", "?")),
        bounded(state),
        _numbers(progress, _PROGRESS),
        _numbers(progress.get("counted", {}), _COUNTED),
    )


def _numbers(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: float(found.get(name) or 0) for name in names}


def _timeline(run: Run, attempts: list[Attempt]) -> Timeline:
    rows: list[tuple[float, int, int, int, int]] = []
    for receipt in run.manifest.parts.values():
        at = _time(receipt.created)
        if at is None:
            continue  # a receipt without a readable time is only missing here
        tokens = sum(p.segment.num_tokens for p in receipt.segments if p.segment.column == 0)
        rows.append((at, receipt.attempt, tokens, receipt.raw_bytes, receipt.size))
    for attempt in attempts if rows else ():
        ready = attempt.progress["engines_timestamp"]
        at = ready if 0 < ready < 1e11 else _time(attempt.created)
        if at is not None:
            rows.append((at, attempt.number, 0, 0, 0))
    table = np.array(sorted(rows), np.float64).reshape(len(rows), 5)
    began = _time(str(run.info.get("created", "")))
    # Machines' clocks differ: a receipt may seem older than the run.
    first = min(began if began is not None else np.inf, table[0, 0]) if len(table) else 0.0
    whole = table[:, 1:].astype(np.int64)
    return Timeline(table[:, 0] - first, whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3])


def _time(text: str) -> float | None:
    """Return the Unix time of a text in ISO 8601, or None for other text."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _reasons(fates: Iterable[RowFate]) -> list[tuple[str, int]]:
    """Count rows by reason. Words with digits are replaced, because they differ from row to row."""
    return Counter(_kind(fate.reason) for fate in fates).most_common(REASONS_SHOWN)


def _kind(reason: str) -> str:
    words = ["…" if any(c.isdigit() for c in word) else word for word in reason.split()]
    return " ".join(words)[:160]


def _layer_sizes(store: Store, run: Run, names: list[str]) -> tuple[list[LayerSize], dict[str, int], dict[str, Any]]:
    step = max(len(names) // PARTS_LOOKED_AT, 1)
    raw: Counter[tuple[str, int]] = Counter()
    stored: Counter[tuple[str, int]] = Counter()
    codecs: Counter[str] = Counter()
    about: dict[str, Any] = {}
    for name in names[::step]:
        receipt = run.manifest.parts[name]
        try:
            part = Part.open(store, name, header_bytes=receipt.header_bytes, size=receipt.size)
        except NotFound:
            continue  # a consumer removed it after the listing
        about = part.about
        codecs[str(part.codec.to_dict().get("name", "?"))] += 1
        for i, info in enumerate(part.segments):
            for layer, nbytes in part.layer_bytes(i).items():
                raw[info.segment.point, layer] += info.segment.num_tokens * info.row_bytes
                stored[info.segment.point, layer] += nbytes
    sizes = [LayerSize(layer, raw[point, layer], stored[point, layer], point) for point, layer in sorted(raw)]
    return sizes, dict(codecs), about
