"""Events of the fleet on Ray for actors that a flush cannot reach. Real nodes: integration/test_nodes_of_a_run.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hsx_dist.fleet import actor_liveness, ray_fleet
from hsx_dist.fleet.base import NodeGone, ReplicaDied, ReplicaReady
from hsx_dist.fleet.nodes import Nodes
from hsx_dist.fleet.ray_fleet import RayFleet
from hsx_dist.fleet.writer_states import WriterState
from hsx_dist.writers.events import Lost, Unusable
from tests.unit.fleet.test_actor_liveness import NEVER, Actor, Call


class Shape:
    replicas, placement, replica_cpus, replica_resources, replica_env = 2, None, 1, {}, {}
    writers_per_node, writer_cpus, writer_threads = 1, 99.0, 1


class FleetActor(Actor):
    """A replica or a writer. ``flush`` raises its ``answers`` first. All else succeeds, with ``node`` or no event."""

    def __init__(self, node=None):
        super().__init__()
        self.node = node
        self.told = None  # the last list of writers
        self.set_writers = SimpleNamespace(remote=lambda listed: setattr(self, "told", listed))
        self.ready = SimpleNamespace(remote=lambda: (Call([]), node))
        self.events = SimpleNamespace(remote=lambda _: (Call([]), ()))


def get(ref):
    call, answer = ref
    if isinstance(answer, int) and answer <= len(call.answers):
        raise call.answers[answer - 1]
    return answer


@pytest.fixture
def fleet(monkeypatch):
    """Replica 0 on node ``a`` and 1 on ``b``, with a writer on each; ``fleet.killed``, ``fleet.nodes``."""
    killed, nodes = [], iter("ab")
    monkeypatch.setattr(actor_liveness.ray, "get", get)
    monkeypatch.setattr(actor_liveness.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_fleet.ray, "kill", lambda actor, **_: killed.append(actor))
    monkeypatch.setattr(
        ray_fleet.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the driver's")
    )
    monkeypatch.setattr(ray_fleet, "start_replica", lambda *_, **__: (FleetActor(next(nodes, "a")), None))
    monkeypatch.setattr(ray_fleet, "start_writer", lambda *_, **__: FleetActor())
    made = RayFleet(None, lambda _: None, Shape, name="t", nodes=lambda: made.nodes)
    made.nodes = Nodes({"a": {"CPU": 100.0}, "b": {"CPU": 100.0}})
    made.killed = killed
    made.start()
    assert sorted(made.poll(0), key=str) == [ReplicaReady(0), ReplicaReady(1)]
    return made


def writers(fleet):
    return [actor for _, actor in fleet.writers.listed]


def out_of_reach():
    return ActorUnavailableError("socket closed", None)


def test_an_actor_that_is_flushed_after_retries_makes_no_event(fleet):
    fleet.actor(0).flush.answers = [out_of_reach()]
    writers(fleet)[1].flush.answers = [out_of_reach(), out_of_reach()]
    assert fleet.flush() == []
    assert fleet.actor(0).flush.calls == 2
    assert [writer.flush.calls for writer in writers(fleet)] == [1, 3]
    assert not fleet.writers.of(WriterState.UNREACHABLE)


def test_a_replica_that_died_before_a_flush_is_reported_and_removed(fleet):
    dead = fleet.actor(1)
    dead.flush.answers = [out_of_reach(), ActorDiedError()]
    [event] = fleet.flush()
    assert isinstance(event, ReplicaDied)
    assert (event.replica, event.fatal, event.blameless) == (1, False, False)
    assert fleet.killed == [dead]
    assert fleet.replicas.keys() == {0, 2}


def test_actors_of_a_lost_node_are_reported_as_lost_with_the_node(fleet):
    writers(fleet)[1].flush.answers = [ActorDiedError()]
    fleet.nodes = Nodes({"a": {"CPU": 100.0}})
    events = fleet.flush()
    assert NodeGone("b") in events
    [died] = [e for e in events if isinstance(e, ReplicaDied)]
    assert (died.replica, died.blameless) == (1, True)
    assert [node for node, _ in fleet.writers.listed] == ["a"]


def test_flushes_wait_once_for_an_unreachable_writer_until_it_answers(fleet, monkeypatch):
    clock = iter(range(0, 100_000, 20))
    monkeypatch.setattr(actor_liveness.time, "monotonic", lambda: next(clock))
    writer = writers(fleet)[0]
    # Its calls fail, also for its events, until it is reachable again.
    heard, writer.events.remote = writer.events.remote, lambda _: (Call([out_of_reach()]), 1)
    fleet.poll(0)
    writer.flush.answers = [out_of_reach()] * 1000
    fleet.flush()
    assert list(fleet.writers.of(WriterState.UNREACHABLE)) == [writer]
    calls = writer.flush.calls
    assert calls > 1
    fleet.flush()
    assert writer.flush.calls == calls + 1
    writer.events.remote = heard
    fleet.poll(0)
    fleet.poll(0)
    assert not fleet.writers.of(WriterState.UNREACHABLE)
    assert writer in writers(fleet)


def test_a_hurried_flush_reports_no_event_of_unreachable_actors(fleet, monkeypatch):
    silent = fleet.actor(1)
    silent.flush.answers = [out_of_reach()] * 1000
    first, second = writers(fleet)
    first.flush.answers = [out_of_reach()] * 1000
    second.events.remote = lambda _: (Call(NEVER), 1)
    fleet.poll(0)

    def wait(refs, num_returns, timeout):
        assert timeout is not None, "expected a time limit"
        there = [ref for ref in refs if ref[0].answers != NEVER]
        return there, [ref for ref in refs if ref not in there]

    monkeypatch.setattr(actor_liveness.ray, "wait", wait)
    fleet.nodes = None  # reading the nodes may take as long: here it would fail
    assert fleet.flush(hurry=lambda: True) == []
    assert fleet.killed == []
    assert not fleet.writers.of(WriterState.UNREACHABLE)
    assert [actor.flush.calls for actor in (silent, first)] == [1, 1]


def test_a_replica_on_a_node_that_drains_is_replaced_and_its_writer_is_flushed(fleet):
    leaving, [_, writer] = fleet.actor(1), writers(fleet)
    fleet.nodes = Nodes({"a": {"CPU": 100.0}}, frozenset("b"))
    events = fleet.flush()
    assert [type(e).__name__ for e in events] == ["ReplicaLeaving", "ReplicaDied"]
    assert events[1].blameless
    assert fleet.killed == [leaving]
    assert leaving.flush.calls == 2  # by the flush, and before it is killed
    assert fleet.replicas.keys() == {0, 2}
    assert fleet.writers.of(WriterState.DRAINING) == {writer: "b"}
    assert [node for node, _ in fleet.writers.listed] == ["a"]
    assert writer.flush.calls == 2


def test_a_writer_that_cannot_open_the_run_is_not_used_and_the_last_one_ends_the_job(fleet):
    first, second = writers(fleet)
    second.events.remote = lambda _: (Call([]), (Unusable("another disk"),))
    assert fleet.poll(0) == []  # the answer of the call before
    assert fleet.poll(0) == []
    assert writers(fleet) == [first]
    assert fleet.killed == [second]
    assert [fleet.actor(number).told for number in (0, 1)] == [[("a", first)]] * 2
    fleet.nodes = Nodes({"b": {"CPU": 100.0}})
    assert Lost((), "another disk", fatal=True) in fleet.flush()
    assert fleet.writers.handles == []


def test_a_job_whose_only_writers_cannot_open_the_run_ends_with_their_error(fleet):
    for writer in writers(fleet):
        writer.events.remote = lambda _: (Call([]), (Unusable("another disk"),))
    fleet.poll(0)
    assert fleet.poll(0) == [Lost((), "another disk", fatal=True)]
    assert len(fleet.killed) == 2


@pytest.fixture
def waiting(fleet, monkeypatch):
    """``waiting(answers)``: a fleet whose writer on ``a`` gives these answers, and whose writer on ``b`` waits."""

    def make(*answers):
        talks, waits, left = FleetActor(), FleetActor(), iter(answers)
        talks.events.remote = lambda _: (Call([]), next(left, ()))
        waits.events.remote = lambda _: (Call(NEVER), 1)
        started = iter([talks, waits])
        monkeypatch.setattr(ray_fleet, "start_writer", lambda *_, **__: next(started))
        there = lambda refs, **_: ([r for r in refs if r[0].answers != NEVER], [])  # noqa: E731
        monkeypatch.setattr(actor_liveness.ray, "wait", there)
        made = RayFleet(None, lambda _: None, Shape, name="t", nodes=lambda: fleet.nodes)
        made.start()
        return made

    return make


def test_before_the_first_row_a_job_waits_for_a_writer_and_says_why_another_is_not_used(waiting):
    made = waiting((Unusable("another disk"),))
    assert made.poll(0) == []
    assert list(made.writers.of(WriterState.STARTING).values()) == ["b"]
    assert made.waits_for() == "writers start, or wait for free CPUs; a writer is not used: another disk"


def test_a_job_ends_when_rows_run_and_the_only_usable_writer_waits_for_a_cpu(waiting):
    """Without a writer, the rows would count as failed."""
    made = waiting((), (Unusable("the mount is gone"),))
    assert len(made.poll(0)) == 2  # both replicas are ready
    assert made.poll(0) == [Lost((), "the mount is gone", fatal=True)]
