"""What the fleet on Ray tells of those that a flush cannot reach; on real nodes: integration/test_nodes_of_a_run.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hsx_dist.fleet import actor_liveness, ray_fleet
from hsx_dist.fleet.base import NodeGone, ReplicaDied
from hsx_dist.fleet.nodes import Nodes
from hsx_dist.fleet.ray_fleet import RayFleet, _Replica
from tests.unit.fleet.test_actor_liveness import NEVER, Actor, Call, get


class Shape:
    replicas, placement, replica_cpus, replica_resources, replica_env = 2, None, 1, {}, {}
    writers_per_node, writer_cpus, writer_threads = 1, 99.0, 1


@pytest.fixture
def fleet(monkeypatch):
    """Replicas 0 on node ``a`` and 1 on ``b``; a writer on each; ``fleet.killed``, ``fleet.nodes``."""
    monkeypatch.setattr(actor_liveness.ray, "get", get)
    monkeypatch.setattr(actor_liveness.ray, "wait", lambda refs, **_: (refs, []))
    killed = []
    monkeypatch.setattr(ray_fleet.ray, "kill", lambda actor, **_: killed.append(actor))
    started = []

    def start_replica(*_, **__):
        started.append(Actor())
        started[-1].ready = started[-1].flush
        return started[-1], None

    monkeypatch.setattr(ray_fleet, "start_replica", start_replica)
    made = RayFleet(None, None, Shape, name="t", nodes=lambda: made.nodes)
    made.nodes = Nodes({"a": {"CPU": 100.0}, "b": {"CPU": 100.0}})
    made.killed, made.started = killed, started
    made._served = ["a", "b"]
    made._numbers = 2
    made._ever_ready = True
    for actor in (replicas := [Actor(), Actor()]):
        actor.set_writers = SimpleNamespace(remote=lambda _: None)
    made._replicas = {n: _Replica(replicas[n], None, 0, node="ab"[n], state="ready") for n in range(2)}
    made._writers = [("a", Actor()), ("b", Actor())]
    return made


def out_of_reach():
    return ActorUnavailableError("socket closed", None)


def test_nothing_is_told_of_those_that_are_flushed(fleet):
    fleet._replicas[0].actor.flush.answers = [out_of_reach()]
    fleet._writers[1][1].flush.answers = [out_of_reach(), out_of_reach()]
    assert fleet.flush() == []
    assert fleet._replicas[0].actor.flush.calls == 2
    assert [writer.flush.calls for _, writer in fleet._writers] == [1, 3]
    assert fleet._given_up == set()


def test_a_replica_that_is_found_dead_is_told_and_gets_no_row(fleet):
    dead = fleet._replicas[1].actor
    dead.flush.answers = [out_of_reach(), ActorDiedError()]
    [event] = fleet.flush()
    assert isinstance(event, ReplicaDied)
    assert (event.replica, event.fatal, event.blameless) == (1, False, False)
    assert fleet.killed == [dead]
    assert fleet._replicas.keys() == {0, 2}


def test_what_was_on_a_node_that_is_gone_is_told_as_gone_with_it(fleet):
    fleet._writers[1][1].flush.answers = [ActorDiedError()]
    fleet.nodes = Nodes({"a": {"CPU": 100.0}})
    events = fleet.flush()
    assert NodeGone("b") in events
    [died] = [e for e in events if isinstance(e, ReplicaDied)]
    assert (died.replica, died.blameless) == (1, True)
    assert [node for node, _ in fleet._writers] == ["a"]


def test_a_writer_that_stays_out_of_reach_is_waited_for_once(fleet, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(actor_liveness.time, "monotonic", lambda: next(clock))
    writer = fleet._writers[0][1]
    writer.flush.answers = [out_of_reach()] * 1000
    fleet.flush()
    assert fleet._given_up == {writer}
    calls = writer.flush.calls
    assert calls > 1
    fleet.flush()
    assert writer.flush.calls == calls + 1


def test_a_flush_in_a_hurry_tells_nothing_of_those_it_did_not_hear(fleet, monkeypatch):
    silent = fleet._replicas[1].actor
    silent.flush.answers = [out_of_reach()] * 1000
    fleet._writers[0][1].flush.answers = [out_of_reach()] * 1000
    fleet._listening = {(Call(NEVER), 1): fleet._writers[1][1]}

    def wait(refs, num_returns, timeout):
        assert timeout is not None, "for as long as it takes"
        there = [ref for ref in refs if ref[0].answers != NEVER]
        return there, [ref for ref in refs if ref not in there]

    monkeypatch.setattr(actor_liveness.ray, "wait", wait)
    fleet._look = lambda: pytest.fail("looked for nodes, which may take as long")
    assert fleet.flush(hurry=lambda: True) == []
    assert fleet.killed == []
    assert fleet._given_up == set()
    assert [actor.flush.calls for actor in (silent, fleet._writers[0][1])] == [1, 1]
