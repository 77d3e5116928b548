"""Exports a meter to Ray: every few seconds, adds its increments to ``ray.util.metrics``, which Prometheus scrapes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import ray
from ray.util.metrics import Counter, Gauge

from hsx_dist.observe.metrics import METRICS, Increments, Meter

#: Seconds between two reads of the meter. (Ray reports them every ``metrics_report_interval_ms``, 10 s by default.)
EVERY_S = 2.0


class _Counter(Counter):
    """A counter that can be exported as 0, which ``inc`` refuses."""

    def begin(self, tags: Mapping[str, str]) -> None:
        self._record(0, dict(tags))


class RayExport:
    """Exports the metrics of one kind of process: ``where`` is ``driver``, ``replica`` or ``writer``.

    ``tags``: values of ``run``, and of ``replica`` or ``writer``; ``node``, its address, is added.
    """

    def __init__(self, meter: Meter, where: str, tags: Mapping[str, str]):
        self._increments = Increments(meter)
        own = {"run": "", **({} if where == "driver" else {where: ""})}
        self._tags = {**own, **tags, "node": ray.util.get_node_ip_address()}
        self._metrics = {
            m.name: (_Counter if m.kind == "counter" else Gauge)(
                f"hsx_{m.name}", m.text, tag_keys=(*self._tags, *([m.tag] if m.tag else []))
            )
            for m in METRICS
            if m.where == where
        }
        self._tag_of = {m.name: m.tag for m in METRICS}
        self._lock = threading.Lock()
        self._end = threading.Event()
        for m in METRICS:  # export 0: a rate needs a first value, and an alert must not wait for a first event
            if m.where == where and m.kind == "counter":
                for value in m.values:
                    self._metrics[m.name].begin({**self._tags, **({m.tag: value} if m.tag else {})})
        self._thread = threading.Thread(target=self._loop, name="hsx-metrics", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._end.wait(EVERY_S):
            self.push()

    def push(self) -> None:
        """Export the increments since the last call to Ray."""
        with self._lock:
            for (name, label), value in self._increments.take().items():
                metric = self._metrics.get(name)
                if metric is None:
                    continue  # a metric of another kind of process
                tags = {**self._tags, self._tag_of[name]: label} if label else self._tags
                if isinstance(metric, Counter):
                    metric.inc(value, tags)
                else:
                    metric.set(value, tags)

    def close(self) -> None:
        """Push once more, and end the thread."""
        self._end.set()
        self._thread.join()
        self.push()
