"""What a connector counts, through vLLM's own metrics: its log line, its ``/metrics``, and Ray's where Ray serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hsx_dist.connector.outlet import Outlet
    from hsx_dist.connector.worker import WorkerHalf

#: Name → what it counts. All but the last are counters: vLLM is told what was added since the last step.
COUNTERS = {
    "samples": "Samples whose states were all handed to the writers.",
    "skipped": "Finished requests of which nothing is stored (aborted early, not wanted, no token ids).",
    "stored": "Samples that the store has taken (a bare connector's; a job's are counted by receipts).",
    "failed": "Samples that could not be stored (a bare connector's).",
    "pages": "Pages copied out of the cache.",
    "bytes": "Bytes of hidden states copied out of the cache.",
    "ring_full_seconds": "Seconds in which the engine had nothing to do but wait for the writers.",
}
GAUGE = "ring_bytes"
GAUGE_TEXT = "Bytes between the cache and the writers now."


class HiddenStatesStats(KVConnectorStats):
    """Sums of one interval; ``data``: name → number."""

    @classmethod
    def of(cls, outlet: Outlet | None, worker: WorkerHalf | None) -> HiddenStatesStats | None:
        """What was added since the last call; None when nothing was."""
        if outlet is None or worker is None:
            return None
        data = outlet.counts.take()
        seconds, worker.seconds_full = worker.seconds_full, 0.0
        if seconds:
            data["ring_full_seconds"] = seconds
        if not data:
            return None
        data[GAUGE] = outlet.ring.used_bytes
        return cls(data=data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """``vllm:hidden_states_<name>_total`` for each counter, ``vllm:hidden_states_ring_bytes``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: metric_types[Counter](name=f"vllm:hidden_states_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        gauge = metric_types[Gauge](name=f"vllm:hidden_states_{GAUGE}", documentation=GAUGE_TEXT, labelnames=labelnames)
        self._metrics = {
            engine: {name: metric.labels(*values) for name, metric in [*counters.items(), (GAUGE, gauge)]}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        metrics = self._metrics[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == GAUGE:
                metrics[name].set(value)
            elif name in metrics:
                metrics[name].inc(value)
