"""Several nodes, as raylets on this machine, with real CPU vLLM. Replicas run on each node, tensor-parallel ones, too.
Nodes are added, drained and killed during a run.

Tensor parallelism *across* nodes is not run here: vLLM's Ray executor refuses CPUs. tests/unit/fleet/test_ray_fleet.py
checks its settings.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager, suppress
from itertools import islice

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from hsx_dist.config import load_config
from hsx_dist.fleet.base import ReplicaDied, ReplicaLeaving, ReplicaReady, TaskDone
from hsx_dist.fleet.drain import drain_node
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import load_manifest
from hsx_dist.jobs import extract as extracting
from hsx_dist.jobs.limits import Limits
from hsx_dist.reading import open_run
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.harness.unruly_model import unruly_llama, write_unruly_plugin
from tests.integration.oracle import Oracle

pytestmark = pytest.mark.integration

QUICK = {
    "health_check_period_ms": 500,
    # 10 s: as with Ray's defaults, calls fail (after 1 s) long before Ray declares a killed node dead.
    "health_check_failure_threshold": 20,
    "health_check_initial_delay_ms": 500,
}
MEMORY = 100 << 20


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(write_unruly_plugin(tmp_path / "plugin")))
    head = {"num_cpus": 0, "_system_config": QUICK, "include_dashboard": False, "object_store_memory": MEMORY}
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return unruly_llama(tmp_path_factory.mktemp("model") / "m", step_seconds=0.1, poison_token=319, kv_heads=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(2)
    found = {f"k{i:02d}": rng.integers(0, 300, int(n)).tolist() for i, n in enumerate(rng.integers(20, 200, 80))}
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": k, "token_ids": ids}) + "\n" for k, ids in found.items()))
    return path, found


def configured(model, rows, output, **more):
    engine = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "block_size": 32}
    settings = {
        "model": str(model),
        "layers": [0, "last"],
        "output": str(output),
        "input": {"path": str(rows[0]), "limit": more.pop("limit", None)},
        "engine_kwargs": {**engine, "max_num_batched_tokens": 64, **more.pop("engine_kwargs", {})},
        "writers": {"num_cpus": 0, "credit_bytes": "2MiB"},
        "page_bytes": "256KiB",
        "segment_bytes": "1MiB",
        "in_flight_bytes": "2MiB",
        "part_bytes": "2MiB",
        "store": {"shared": True},  # all these nodes are one machine
        "task_rows": 4,
        **more,
    }
    return load_config(None, (), **settings)


def check(output, model, wanted):
    run = open_run(str(output))
    assert sorted(run.keys()) == sorted(wanted)
    assert run.failed == {}
    oracle = Oracle(model)
    for key, ids in wanted.items():
        data = run[key].load(framework="torch")
        assert data["token_ids"].tolist() == ids
        oracle.assert_equal(ids, data["hidden_states"], (0, 4))
    assert verify_run(open_store(str(output))).ok


class Meddling:
    """A fleet that calls ``meddle(fleet, events)`` before and after every poll. It keeps the events, and counts the
    rows that it received.
    """

    def __init__(self, fleet, meddle):
        self.fleet = fleet
        self.meddle = meddle
        self.seen = []
        self.given = 0

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def ready(self, replica):
        return any(isinstance(e, ReplicaReady) and e.replica == replica for e in self.seen)

    def submit(self, replica, task):
        self.given += len(task.rows)
        self.fleet.submit(replica, task)

    def poll(self, timeout):
        self.meddle(self.fleet, self.seen)
        events = self.fleet.poll(timeout)
        self.seen += events
        self.meddle(self.fleet, self.seen)
        return events

    def flush(self, timeout=None, **more):
        events = self.fleet.flush(timeout, **more)
        self.seen += events
        return events


def meddling(monkeypatch, meddle):
    made = []
    real = extracting.make_fleet

    def make_fleet(*arguments):
        made.append(Meddling(real(*arguments), meddle))
        return made[0]

    monkeypatch.setattr(extracting, "make_fleet", make_fleet)
    return made


def process_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def cut_connections(actor):
    """Shut down this process's connections to the actor: it stays alive, and its answers are lost."""
    to = {c.laddr.port for c in psutil.Process(process_of(actor)).net_connections("tcp") if c.status == "LISTEN"}
    own = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port in to]
    assert own
    for connection in own:
        with socket.socket(fileno=os.dup(connection.fd)) as same:
            same.shutdown(socket.SHUT_RDWR)


def titles_and_untitled(prefix):
    """The titles of this process's descendants, and how many have vLLM's prefix in their environment but no title.

    setproctitle silently does nothing in a process that has changed the first variable of its environment. A raylet
    passes variables to a worker in any order. If LD_LIBRARY_PATH is first, which a library changes on import, the
    engine's process and its ranks have no title.
    """
    titles, untitled = set(), 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has just ended
            titles.add(" ".join(process.cmdline()).strip())
            spawned = "--multiprocessing-fork" in process.cmdline()
            untitled += spawned and process.environ().get("VLLM_PROCESS_NAME_PREFIX") == prefix
    return titles, untitled


@pytest.mark.soak  # test_engine_processes.py and test_points_ranks.py have two ranks without Ray
def test_a_replica_of_two_ranks(cluster, model, rows, tmp_path, monkeypatch):
    cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    running: list[tuple[set[str], int]] = []  # titles when the first task is done

    def look(_, seen):
        if not running and any(isinstance(e, TaskDone) for e in seen):
            running.append(titles_and_untitled("hsx replica 0"))

    meddling(monkeypatch, look)
    ranks = configured(
        model, rows, tmp_path / "ranks", replica={"num_cpus": 2}, engine_kwargs={"tensor_parallel_size": 2}, limit=16
    )
    assert extracting.run_extract(ranks).exit_status == 0
    check(tmp_path / "ranks", model, dict(islice(rows[1].items(), 16)))
    [(titles, untitled)] = running
    engine = {f"hsx replica 0::{name}" for name in ("EngineCore", "Worker_TP0", "Worker_TP1")}
    assert len(engine & titles) + untitled >= len(engine)


@pytest.mark.slow
def test_nodes_that_come_drain_and_vanish_cost_no_row(cluster, model, rows, tmp_path, monkeypatch):
    """With max_tries 1, blaming a row once would lose it."""
    nodes = {"first": cluster.add_node(num_cpus=1, object_store_memory=MEMORY)}
    cluster.wait_for_nodes()

    def done_by(seen, replica):
        return any(isinstance(e, TaskDone) and e.replica == replica for e in seen)

    def meddle(fleet, seen):
        if "second" not in nodes and done_by(seen, 0):
            nodes["second"] = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        if "drained" not in nodes and done_by(seen, 1):  # replica 1 had no room until the new node was added
            assert fleet.replicas[1].node == nodes["second"].node_id
            drain_node(600, address=cluster.address, node=nodes["first"].node_id)
            nodes["drained"] = True
            nodes["third"] = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        if "vanished" not in nodes and done_by(seen, 2):  # replica 2 replaces the drained one
            assert fleet.replicas[2].node == nodes["third"].node_id
            nodes["vanished"] = True
            pid = process_of(fleet.actor(1))
            cluster.remove_node(nodes["second"], allow_graceful=False)
            os.kill(pid, 9)  # a worker outlives its raylet for a moment, unlike on a machine that fails

    made = meddling(monkeypatch, meddle)

    @contextmanager
    def a_few_until_the_next_engine_is_up(*_):
        def held():
            [fleet] = made
            most = 16 if not fleet.ready(1) else 40 if not fleet.ready(2) else len(rows[1]) * 2
            return 0 if fleet.given < most else 1 << 62

        yield Limits(held=held, max_held_bytes=1 << 61)

    monkeypatch.setattr(extracting, "limits_of", a_few_until_the_next_engine_is_up)
    monkeypatch.setattr("hsx_dist.fleet.ray_fleet.NODES_EVERY_S", 1.0)
    config = configured(model, rows, tmp_path / "run", max_replicas=2, max_tries=1, part_seconds=2)
    assert extracting.run_extract(config).exit_status == 0
    assert "vanished" in nodes
    seen = made[0].seen
    assert [e.replica for e in seen if isinstance(e, ReplicaLeaving)] == [0]
    assert [e.replica for e in seen if isinstance(e, ReplicaReady)][:3] == [0, 1, 2]
    died = [e for e in seen if isinstance(e, ReplicaDied)]
    assert {e.replica for e in died} >= {0, 1}
    assert all(e.blameless for e in died)
    # Each replica sent to the writer on its node.
    receipts = load_manifest(open_place(open_store(str(tmp_path / "run"))).store).receipts
    assert len({r.writer.split("w")[0] for r in receipts if r.part is not None}) >= 2
    check(tmp_path / "run", model, rows[1])


@pytest.mark.slow
def test_a_node_that_vanishes_before_the_flush_and_a_broken_connection_cost_no_row(
    cluster, model, rows, tmp_path, monkeypatch
):
    """With max_tries 1 again, and nothing proven before the end. The killed node's writer held all rows. Ray still
    counts its node as alive when the driver misses them.
    """
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(2)]
    cluster.wait_for_nodes()
    wanted = dict(islice(rows[1].items(), 16))
    done = []

    def vanish(node, actors):
        pids = [process_of(actor) for actor in actors]
        cluster.remove_node(node, allow_graceful=False)
        for pid in pids:
            os.kill(pid, 9)

    def meddle(fleet, seen):
        answers = [e for e in seen if isinstance(e, TaskDone)]
        if not done and {key for e in answers for key in e.result.shipped} == wanted.keys():
            replica = fleet.replicas[0]
            [node] = [n for n in nodes if n.node_id == replica.node]
            vanish(node, [fleet.actor(0), *(actor for of, actor in fleet.writers.listed if of == replica.node)])
            done.append("vanished")
        elif done == ["vanished"] and 1 in fleet.replicas and fleet.replicas[1].tasks:
            cut_connections(fleet.actor(1))
            done.append("cut")

    made = meddling(monkeypatch, meddle)
    config = configured(
        model, rows, tmp_path / "run", max_replicas=1, max_tries=1, part_seconds=600, part_bytes="64MiB", limit=16
    )
    assert extracting.run_extract(config).exit_status == 0
    assert done == ["vanished", "cut"]
    died = [e for e in made[0].seen if isinstance(e, ReplicaDied)]
    assert "node" in died[0].reason
    assert "connection" in died[1].reason
    assert all(e.blameless for e in died)
    check(tmp_path / "run", model, wanted)
