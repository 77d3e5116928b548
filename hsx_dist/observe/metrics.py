"""The table of all metrics, and the meter that counts them. Exporters are in other modules.

All sums are counters, so that they are exact and have a rate over any interval. (Ray computes the sum of a histogram
from the middles of its buckets.) A job's actors export to Ray as ``ray_hsx_NAME``; counters get the suffix ``_total``,
and the tags are ``run``, ``node``, and ``replica`` or ``writer``. A server exports to vLLM's ``/metrics`` as
``vllm:hidden_states_NAME``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

#: The name of a counter or gauge, and the value of its tag ("" without a tag).
Series = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``tag``: an additional label. ``served``: a server exports it too."""

    name: str
    kind: Literal["counter", "gauge"]
    where: Literal["driver", "replica", "writer"]
    text: str
    tag: str = ""
    served: bool = True
    #: The tag's values, if they are known beforehand: these series exist from the start.
    values: tuple[str, ...] = ("",)

    @property
    def in_ray(self) -> str:
        """The metric's name in Prometheus on a Ray cluster."""
        return f"ray_hsx_{self.name}" + ("_total" if self.kind == "counter" else "")

    @property
    def in_vllm(self) -> str | None:
        """The metric's name on vLLM's ``/metrics``. None if a server does not export it."""
        if not self.served:
            return None
        return f"vllm:hidden_states_{self.name}" + ("_total" if self.kind == "counter" else "")


#: Upper ends, in seconds, of the buckets of ``put_seconds_bucket``.
PUT_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)
_ENDS = tuple("+Inf" if end == math.inf else f"{end:g}" for end in PUT_BUCKETS)
_FATES = ("stored", "refused", "failed", "poison", "retried")

METRICS: tuple[Metric, ...] = (
    Metric("rows", "counter", "driver", "Input rows by outcome.", "fate", False, _FATES),
    Metric("rows_left", "gauge", "driver", "Input rows without an outcome; 0 when the attempt has ended.", "", False),
    Metric("replicas_ready", "gauge", "driver", "Replicas whose engine is up.", "", False),
    Metric("replica_deaths", "counter", "driver", "Replicas that died or did not start.", "", False),
    Metric("tasks_open", "gauge", "driver", "Tasks of replicas that are not finished.", "", False),
    Metric("oldest_task_seconds", "gauge", "driver", "Age of the oldest of those tasks.", "", False),
    Metric("lost_segments", "counter", "driver", "Segments that a writer took and could not store.", "", False),
    Metric(
        "receipt_timestamp_seconds",
        "gauge",
        "driver",
        "Time of the last stored part, before it of the first ready engine, in Unix seconds.",
        "",
        False,
    ),
    Metric("samples", "counter", "replica", "Samples whose states were all sent to the writers."),
    Metric(
        "skipped",
        "counter",
        "replica",
        "Finished requests without stored states (aborted, not requested, no tokens).",
    ),
    Metric("tokens", "counter", "replica", "Tokens whose states were copied out of the cache."),
    Metric("pages", "counter", "replica", "Pages copied out of the cache."),
    Metric("page_bytes", "counter", "replica", "Bytes of hidden states copied out of the cache."),
    Metric("engine_seconds", "counter", "replica", "Seconds in which the engine's thread worked or waited.", "", False),
    Metric("idle_seconds", "counter", "replica", "Seconds in which the engine had no task.", "", False),
    Metric("copy_seconds", "counter", "replica", "Seconds of engine steps spent on starting copies."),
    Metric(
        "store_wait_seconds",
        "counter",
        "replica",
        "Seconds in which the engine only waited for the writers, and so for the store.",
    ),
    Metric("send_seconds", "counter", "replica", "Seconds of sending pages to writers, including waits for credit."),
    Metric("credit_wait_seconds", "counter", "replica", "Seconds of waiting until a writer had credit.", "", False),
    Metric("ring_bytes", "gauge", "replica", "Bytes in flight between the cache and the writers."),
    Metric("oldest_page_seconds", "gauge", "replica", "Age of the oldest page that was not sent to a writer yet."),
    Metric("blocks_held", "gauge", "replica", "Cache blocks of ended requests that wait to be copied."),
    Metric("credit_bytes", "gauge", "replica", "Bytes that writers accept before they answer.", "", False),
    Metric("unanswered_bytes", "gauge", "replica", "Bytes in flight to writers that have not answered.", "", False),
    Metric("raw_bytes", "counter", "writer", "Bytes of hidden states in stored parts, before encoding."),
    Metric("stored_bytes", "counter", "writer", "Bytes of stored parts, including headers and token ids."),
    Metric("ratio", "gauge", "writer", "Raw bytes per stored byte, since the writer began.", "", False),
    Metric("parts", "counter", "writer", "Stored parts. A job's part has a receipt; a server's part is one sample."),
    Metric("failed_parts", "counter", "writer", "Parts that could not be stored, by error.", "error"),
    Metric("stored", "counter", "writer", "Samples that a server has stored. A job counts `rows` instead."),
    Metric("failed", "counter", "writer", "Samples that a server could not store."),
    Metric("encode_seconds", "counter", "writer", "Thread seconds of compressing and checking pages."),
    Metric(
        "room_wait_seconds",
        "counter",
        "writer",
        "Thread seconds in which writers waited for parts to be stored before they accepted pages.",
    ),
    Metric("puts", "counter", "writer", "Puts of parts, including failed ones."),
    Metric("put_seconds", "counter", "writer", "Thread seconds of putting parts, including retries and pauses."),
    Metric(
        "put_seconds_bucket",
        "counter",
        "writer",
        "Puts that took at most `le` seconds, for quantiles.",
        "le",
        True,
        _ENDS,
    ),
    Metric("store_retries", "counter", "writer", "Calls to the store that failed and were retried, by error.", "error"),
    Metric("held_bytes", "gauge", "writer", "Bytes being encoded, or encoded and not yet stored."),
    Metric("oldest_segment_seconds", "gauge", "writer", "Age of the oldest segment that is in no complete part yet."),
    Metric("nonfinite_rows", "counter", "writer", "Rows of one layer with a NaN or an infinity."),
    Metric("zero_layers", "counter", "writer", "Layers of one segment that are zero throughout."),
)

BY_NAME: Mapping[str, Metric] = {m.name: m for m in METRICS}


class Meter:
    """Counters and gauges of one process. Thread-safe, and fast enough for every page.

    Sums only grow. Several exporters can read them, each with an ``Increments``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Series, float] = {}
        self._gauges: dict[str, list[Callable[[], float]]] = {}
        self._elsewhere: dict[str, dict[Series, float]] = {}

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Add to a counter. ``label`` is the value of the metric's tag."""
        metric = BY_NAME[name]
        assert metric.kind == "counter", name
        assert bool(metric.tag) == bool(label), name
        with self._lock:
            self._sums[name, label] = self._sums.get((name, label), 0) + value

    def put_took(self, seconds: float) -> None:
        """Count a put of a part, stored or failed, that took ``seconds``."""
        self.add("puts")
        self.add("put_seconds", seconds)
        for end, label in zip(PUT_BUCKETS, _ENDS, strict=True):
            if seconds <= end:
                self.add("put_seconds_bucket", 1, label)

    def retried(self, error: Exception) -> None:
        """Count a retry of a store's call, by the type of the error's cause."""
        self.add("store_retries", 1, type(error.__cause__ or error).__name__)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is ``read()`` at the time of the export. Gauges of the same name are added up."""
        assert BY_NAME[name].kind == "gauge", name
        with self._lock:
            self._gauges.setdefault(name, []).append(read)

    def merge(self, source: str, numbers: Mapping[Series, float]) -> None:
        """Add the result of another process's ``Increments``: counters are added, gauges replace the source's last."""
        with self._lock:
            gauges = self._elsewhere.setdefault(source, {})
            for series, value in numbers.items():
                if BY_NAME[series[0]].kind == "counter":
                    self._sums[series] = self._sums.get(series, 0) + value
                else:
                    gauges[series] = value

    def forget(self, source: str) -> None:
        """Drop the gauges of a process that has ended. Its sums stay."""
        with self._lock:
            self._elsewhere.pop(source, None)

    def sums(self) -> dict[Series, float]:
        """Return every counter that was ever added to."""
        with self._lock:
            return dict(self._sums)

    def gauges(self) -> dict[Series, float]:
        """Return the current value of every watched or merged gauge."""
        with self._lock:
            watched = [(name, list(reads)) for name, reads in self._gauges.items()]
            merged = [dict(g) for g in self._elsewhere.values()]
        # Without the lock: ``read`` may take other locks, and threads that hold those call this meter.
        found: dict[Series, float] = {(name, ""): sum(read() for read in reads) for name, reads in watched}
        for gauges in merged:
            for series, value in gauges.items():
                found[series] = found.get(series, 0) + value
        return found


class Increments:
    """A reader of a meter's increments since its last call. For one thread."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._seen: dict[Series, float] = {}

    def counters(self) -> dict[Series, float]:
        """Return by how much each counter grew; only counters that grew."""
        sums = self._meter.sums()
        grown = {s: v - self._seen.get(s, 0) for s, v in sums.items() if v != self._seen.get(s, 0)}
        self._seen = sums
        return grown

    def gauges(self) -> dict[Series, float]:
        """Return the current value of every gauge."""
        return self._meter.gauges()

    def take(self) -> dict[Series, float]:
        """Return ``counters`` and ``gauges`` together."""
        return {**self.counters(), **self.gauges()}


def table() -> str:
    """The metrics as a Markdown table, for docs/operations.md."""
    lines = ["| name on Ray | counted by | what it is | name when served |", "|---|---|---|---|"]
    for m in METRICS:
        values = f": {', '.join(m.values)}" if any(m.values) else ""
        tag = f" (tag `{m.tag}`{values})" if m.tag else ""
        served = f"`{m.in_vllm}`" if m.in_vllm else "none"
        lines.append(f"| `{m.in_ray}`{tag} | {m.where} | {m.text} | {served} |")
    return "\n".join(lines) + "\n"
