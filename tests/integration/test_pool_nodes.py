"""A whole node fails: several raylets on this machine with a writer on each. One raylet is killed without notice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.cluster_utils import Cluster

from hsx_dist.fleet.ray_fleet import ClusterShape, RayFleet
from hsx_dist.fleet.writer_states import WriterState
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.observe.metrics import Meter
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.writers.events import Counted
from hsx_dist.writers.ray_pool import PoolWriterSpec, RaySender
from hsx_dist.writers.sink import SinkOptions
from tests.harness.discard import Answer, Request, discard_server
from tests.harness.runs import write_v1_run

pytestmark = pytest.mark.integration

QUICK = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 500,
}
SAMPLES = {f"k{i:02d}": random_sample(f"k{i:02d}", tokens=40, seed=i) for i in range(20)}


@pytest.fixture
def cluster():
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "_system_config": QUICK,
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
        },
    )
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@contextmanager
def writers(
    *, writer_cpus: float, answer: Callable[[Request], Answer | None] = lambda _: None
) -> Iterator[tuple[RayFleet, Store]]:
    """One writer per node, and the run that they store."""
    with discard_server(answer) as server:
        options = server.storage_options()
        store = open_store("s3://b/run", options)
        write_v1_run(store, {})
        attempt = take_attempt(store, {})

        def spec(name: str) -> PoolWriterSpec:
            sink = SinkOptions(resolve_codec("split"), {}, name, attempt, part_bytes=1 << 20)
            return PoolWriterSpec("s3://b/run", options, "auto", 30.0, {}, sink, 1 << 20)

        shape = ClusterShape(0, 0, 0, {}, {}, writers_per_node=1, writer_cpus=writer_cpus, writer_threads=1)
        fleet = RayFleet(None, spec, shape, name="t")  # type: ignore[arg-type]  # no replica, no engine
        fleet.start()
        yield fleet, store
        fleet.close()


def test_a_node_that_dies_takes_no_sample_with_it(cluster):
    """Pages for the lost writer go to another node's. The fleet forgets the writer, and starts one on a new node."""
    doomed = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    with writers(writer_cpus=0) as (fleet, store):
        while len(fleet.writers.listed) < 2:  # ends: both nodes have room for a writer
            fleet.poll(1.0)
        lost = []
        meter = Meter()
        sender = RaySender(fleet.writers.listed, lost.append, node=doomed.node_id, meter=meter)

        def send() -> None:
            for key in sorted(SAMPLES.keys() - load_manifest(store).samples.keys()):
                sender.send(list(SAMPLES[key].pages()), lambda _: None)

        send()
        sender.flush()
        assert not meter.gauges()["unanswered_bytes", ""]
        here = dict(fleet.writers.listed)[doomed.node_id]
        assert load_manifest(store).samples == {}  # the writer that will die has all samples, and nothing is proven
        pid = ray.get(here.__ray_call__.remote(lambda _: os.getpid()))
        cluster.remove_node(doomed, allow_graceful=False)
        os.kill(pid, signal.SIGKILL)  # a worker outlives its raylet for a moment, unlike on a machine that fails
        for _ in range(20):
            send()
            sender.flush()
            fleet.flush()
            if load_manifest(store).samples.keys() == SAMPLES.keys():
                break
        assert load_manifest(store).samples.keys() == SAMPLES.keys()
        assert verify_run(store).ok
        while doomed.node_id in {
            node for node, _ in fleet.writers.listed
        }:  # ends: Ray reports the death within seconds
            fleet.poll(0.5)
        assert len(fleet.writers.handles) == 1
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        while len(fleet.writers.handles) < 2:  # ends: the fleet sees the node within seconds
            time.sleep(0.1)
            fleet.poll(0)
        assert len(fleet.writers.listed) == 1  # a writer is listed only after it is alive
        while len(fleet.writers.listed) < 2:  # ends: the node has room for a writer
            fleet.poll(0.5)
        assert doomed.node_id not in dict(fleet.writers.listed)


def test_a_writer_without_a_free_cpu_does_not_block_the_run(cluster):
    """Another job keeps the CPU of one node. The run goes on, and ends, with the writers on other nodes."""
    busy = cluster.add_node(num_cpus=1, resources={"busy": 1}, object_store_memory=100 << 20)
    cluster.wait_for_nodes()

    class Holder:
        def hold(self) -> None:
            pass

    holder = ray.remote(num_cpus=1, resources={"busy": 1})(Holder).remote()
    ray.get(holder.hold.remote())
    with writers(writer_cpus=1) as (fleet, store):
        while not fleet.writers.listed:  # ends: the other node has room for a writer
            fleet.poll(0.5)
        assert [node for node, _ in fleet.writers.listed] != [busy.node_id]
        assert list(fleet.writers.of(WriterState.STARTING).values()) == [busy.node_id]
        lost = []
        sender = RaySender(fleet.writers.listed, lost.append)
        for sample in SAMPLES.values():
            sender.send(list(sample.pages(sample.segments()[0])), lambda _: None)
        sender.flush()
        fleet.flush()
        assert set(load_manifest(store).samples) == set(SAMPLES)
        assert lost == []


def test_pages_sent_to_other_nodes_stay_within_their_bound(cluster):
    """Credits count bytes in the writer's node's object store. Until received, pages are in the sender's, too."""
    with writers(writer_cpus=0) as (fleet, store):
        while not fleet.writers.listed:  # ends: the node has room for a writer
            fleet.poll(0.5)
        lost, unanswered = [], []
        abroad = 2 * max(page.nbytes for sample in SAMPLES.values() for page in sample.pages())
        meter = Meter()
        sender = RaySender(fleet.writers.listed, lost.append, node="another", abroad_bytes=abroad, meter=meter)
        for _ in range(3):
            for sample in SAMPLES.values():
                sender.send(list(sample.pages()), lambda _: unanswered.append(meter.gauges()["unanswered_bytes", ""]))
        sender.flush()
        fleet.flush()
        assert set(load_manifest(store).samples) == set(SAMPLES)
        assert lost == []
        assert 0 < max(unanswered) <= abroad


def test_a_hurried_flush_returns_when_the_store_is_down_and_the_next_flush_succeeds(cluster):
    """As when a run is stopped while it waits for its last part."""
    refused: list[str] = []
    up = threading.Event()

    def answer(request: Request) -> Answer | None:
        if up.is_set() or request.method != "PUT" or "/data/" not in request.path:
            return None
        refused.append(request.path)
        return Answer(503)

    with writers(writer_cpus=0, answer=answer) as (fleet, store):
        while not fleet.writers.listed:  # ends: the node has room for a writer
            fleet.poll(0.5)
        sender = RaySender(fleet.writers.listed, lambda _: None)
        for sample in SAMPLES.values():
            sender.send(list(sample.pages()), lambda _: None)
        sender.flush()
        told = fleet.flush(hurry=lambda: len(refused) > 1)
        assert len(refused) > 1
        assert [event for event in told if not isinstance(event, Counted)] == []
        assert load_manifest(store).samples == {}
        up.set()
        told = fleet.flush()
        assert [type(event) for event in told if not isinstance(event, Counted)] == [Receipt]
        assert set(load_manifest(store).samples) == set(SAMPLES)
