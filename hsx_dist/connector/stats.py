"""The connector's metrics, reported through vLLM: its log line, its ``/metrics``, and Ray's metrics under Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hsx_dist.observe.metrics import BY_NAME, METRICS, Increments

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Separates a metric's name from its tag's value: vLLM carries a flat dictionary between its processes.
_BAR = "|"


class HiddenStatesStats(KVConnectorStats):
    """Increments of counters over one interval, and values of gauges; ``data``: ``name`` or ``name|tag`` → number."""

    @classmethod
    def of(cls, increments: Increments) -> HiddenStatesStats | None:
        """Return the counters' increments since the last call, with the gauges; None if no counter has grown."""
        grown = increments.counters()
        if not grown:
            return None
        numbers = {**grown, **increments.gauges()}
        served = {series: value for series, value in numbers.items() if BY_NAME[series[0]].served}
        return cls(data={f"{name}{_BAR}{label}" if label else name: value for (name, label), value in served.items()})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line: no gauges, which ``aggregate`` sums over steps, and no buckets."""
        counters = {n: v for n, v in self.data.items() if BY_NAME[n.partition(_BAR)[0]].kind == "counter"}
        return {name: round(value, 3) for name, value in counters.items() if "_bucket" not in name}

    def is_empty(self) -> bool:
        return not self.data


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics ``vllm:hidden_states_NAME`` of a server; counters' names end with ``_total``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._metrics = {
            m.name: metric_types[Counter if m.kind == "counter" else Gauge](
                name=f"vllm:hidden_states_{m.name}",
                documentation=m.text,
                labelnames=[*labelnames, *([m.tag] if m.tag else [])],
            )
            for m in METRICS
            if m.served
        }
        for values in per_engine_labelvalues.values():  # export zeros: an alert must not wait for the first event
            for m in METRICS:
                for label in m.values if m.served else ():
                    self._metrics[m.name].labels(*values, *([label] if m.tag else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for series, value in transfer_stats_data.items():
            name, _, label = series.partition(_BAR)
            if name not in self._metrics:
                continue
            metric = self._metrics[name].labels(*self._engines[engine_idx], *([label] if label else []))
            if BY_NAME[name].kind == "gauge":
                metric.set(value)
            else:
                metric.inc(value)
