"""A connector's counters on their way through vLLM: from a worker's interval to Prometheus and to Ray's metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics import ray_wrappers

from hsx_dist.connector.connector import HiddenStatesConnector
from hsx_dist.observe.metrics import METRICS, Increments, Meter

PROMETHEUS = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
RAY = {
    Gauge: ray_wrappers.RayGaugeWrapper,
    Counter: ray_wrappers.RayCounterWrapper,
    Histogram: ray_wrappers.RayHistogramWrapper,
}


@pytest.fixture
def interval():
    """The counts of two ranks, as vLLM adds them up: only data crosses its processes."""
    from hsx_dist.connector.stats import HiddenStatesStats

    both = HiddenStatesConnector.build_kv_connector_stats()
    assert both.is_empty()
    for stored in (2, 3):
        meter = Meter()
        increments = Increments(meter)
        assert HiddenStatesStats.of(increments) is None  # nothing happened, so nothing is sent
        meter.add("stored", stored)
        meter.add("failed_parts", 1, "Denied")
        meter.watch("ring_bytes", lambda: 64)
        told = HiddenStatesStats.of(increments)
        both = both.aggregate(HiddenStatesConnector.build_kv_connector_stats(data=dict(told.data)))
        assert HiddenStatesStats.of(increments) is None  # each is reported once
    return both


def build(types):
    config = SimpleNamespace(kv_transfer_config=None)
    return HiddenStatesConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


@pytest.fixture
def registry():
    """Restore Prometheus's registry, which vLLM changes."""
    before = set(REGISTRY._collector_to_names)
    yield REGISTRY
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_counters_of_all_ranks_reach_prometheus(interval, registry):
    assert interval.reduce()["stored"] == 5  # vLLM's log line
    assert "ring_bytes" not in interval.reduce()
    metrics = build(PROMETHEUS)
    for _ in range(2):
        metrics.observe(interval.data, 0)
    at = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:hidden_states_stored_total", at) == 10
    assert registry.get_sample_value("vllm:hidden_states_failed_parts_total", {**at, "error": "Denied"}) == 4
    assert registry.get_sample_value("vllm:hidden_states_ring_bytes", at) > 0
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert {m.in_vllm for m in METRICS if m.served and m.values} <= names  # 0 is a number too
    metrics.observe({"of another connector": 1})


def test_counters_reach_rays_metrics_where_ray_serves(interval, monkeypatch):
    """Through vLLM's wrappers of Ray's metrics (``RayKVConnectorProm``). They import Ray Serve, which is not installed
    here, to find their replica.
    """
    import ray.util.metrics

    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray.util.metrics)
    monkeypatch.setattr(ray_wrappers, "_get_replica_id", lambda: None)
    seen = []
    monkeypatch.setattr("ray.util.metrics.Counter.inc", lambda _, value, tags: seen.append((value, tags)))
    metrics = build(RAY)
    metrics.observe(interval.data, 0)
    told = [(value, tags.get("error")) for value, tags in seen if value]
    assert (5, None) in told
    assert (2, "Denied") in told
    assert all(tags["model_name"] == "m" and tags["engine"] == "0" for _, tags in seen)
