"""The meter, the table of metrics, and a check that all code counts under names of the table."""

from __future__ import annotations

import ast
import math
import threading
from pathlib import Path

import pytest

import hsx_dist
from hsx_dist.observe.metrics import BY_NAME, METRICS, PUT_BUCKETS, Increments, Meter, table

ROOT = Path(hsx_dist.__file__).parents[1]


def test_every_reader_sees_all_that_was_added():
    meter = Meter()
    one, other = Increments(meter), Increments(meter)
    meter.add("pages", 2)
    meter.add("failed_parts", 1, "Denied")
    assert one.counters() == {("pages", ""): 2, ("failed_parts", "Denied"): 1}
    meter.add("pages", 3)
    assert one.counters() == {("pages", ""): 3}
    assert one.counters() == {}
    assert other.counters() == {("pages", ""): 5, ("failed_parts", "Denied"): 1}


def test_gauges_of_one_name_add_up_and_those_of_a_process_that_ended_are_gone():
    meter = Meter()
    meter.watch("ring_bytes", lambda: 10)
    meter.watch("ring_bytes", lambda: 5)
    meter.merge("pid 1", {("ring_bytes", ""): 100, ("pages", ""): 7})
    meter.merge("pid 1", {("ring_bytes", ""): 200, ("pages", ""): 7})
    assert meter.gauges() == {("ring_bytes", ""): 215}
    meter.forget("pid 1")
    assert meter.gauges() == {("ring_bytes", ""): 15}
    assert meter.sums() == {("pages", ""): 14}


def test_sums_of_concurrent_threads_are_exact():
    meter = Meter()
    threads = [threading.Thread(target=lambda: [meter.add("tokens", 3) for _ in range(1000)]) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert meter.sums() == {("tokens", ""): 24_000}


def test_puts_fall_into_every_bucket_that_is_wide_enough():
    meter = Meter()
    for seconds in (0.01, 0.3, 1000):
        meter.put_took(seconds)
    sums = meter.sums()
    assert (sums["puts", ""], sums["put_seconds", ""]) == (3, pytest.approx(1000.31))
    assert sums["put_seconds_bucket", "0.025"] == 1
    assert sums["put_seconds_bucket", "0.5"] == 2
    assert sums["put_seconds_bucket", "60"] == 2
    assert sums["put_seconds_bucket", "+Inf"] == 3
    assert PUT_BUCKETS[-1] == math.inf


def test_metrics_that_are_in_no_table_raise():
    with pytest.raises(KeyError):
        Meter().add("pagse")
    with pytest.raises(AssertionError):
        Meter().add("rows", 1)  # the label is missing
    with pytest.raises(AssertionError):
        Meter().add("ring_bytes", 1)  # a gauge


def test_every_metric_is_counted_somewhere_and_nothing_else_is():
    found = set()
    for path in sorted((ROOT / "hsx_dist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                owner = ast.unparse(node.func.value)
                first = node.args[0]
                meter = owner.endswith("meter") or (owner == "self" and path.name == "metrics.py")
                if meter and node.func.attr in ("add", "watch") and isinstance(first, ast.Constant):
                    found.add(first.value)
                if node.func.attr == "_wait" and isinstance(first, ast.Constant):  # the replica's clock
                    found.add(first.value)
    counted_in_loops = {"pages", "page_bytes", "tokens", "send_seconds", "samples", "skipped", "stored", "failed"}
    assert found | counted_in_loops == set(BY_NAME)


def test_names_are_unique_and_follow_prometheus():
    assert len(BY_NAME) == len(METRICS)
    for m in METRICS:
        assert m.name.replace("_", "").isalpha(), m.name
        assert not m.name.endswith("_total")
        assert m.text.endswith("."), m.name


def test_the_page_on_operations_has_the_table_as_it_is():
    assert table() in (ROOT / "docs" / "operations.md").read_text(), "run `make tables`"
