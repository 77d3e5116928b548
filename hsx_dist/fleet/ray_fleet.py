"""The fleet on a Ray cluster: one actor a replica, writers on every node, all made by the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, RayError

from hsx_dist.fleet.actor_liveness import KNOWN_AFTER_S, Inquiry, failures, flush_until_known, flushing, wait_for_all
from hsx_dist.fleet.base import (
    Draining,
    FleetEvent,
    NodeGone,
    ReplicaDied,
    ReplicaLeaving,
    ReplicaReady,
    ReplicaUnreached,
    TaskDone,
)
from hsx_dist.fleet.capacity import fits_writers
from hsx_dist.fleet.nodes import Nodes, look
from hsx_dist.fleet.placement import Placement
from hsx_dist.fleet.ray_errors import reason_of, went_with_its_node
from hsx_dist.fleet.replica_actor import start_replica
from hsx_dist.fleet.tasks import EngineSpec, Task
from hsx_dist.logger import get_logger
from hsx_dist.writers.ray_pool import PoolWriterSpec, start_writer

log = get_logger(__name__)

#: How often the cluster is asked which nodes it has.
NODES_EVERY_S = 5.0
#: How long engines may take to end by themselves before they are killed: everything of theirs is stored by then.
CLOSE_S = 30.0


@dataclass(frozen=True)
class ClusterShape:
    """How many actors of which size. ``replicas``: at most so many; those for which there is no room wait for it, and
    an autoscaler sees them wait."""

    replicas: int
    placement: Placement
    replica_cpus: float
    replica_resources: Mapping[str, float]
    replica_env: Mapping[str, str]
    writers_per_node: int
    writer_cpus: float
    writer_threads: int


@dataclass(slots=True)
class _Replica:
    """One replica as the driver's side sees it. ``failures``: starts and deaths of its kind in a row."""

    actor: Any
    group: Any
    failures: int
    node: str = ""
    state: Literal["starting", "ready", "leaving"] = "starting"
    tasks: dict[Any, Task] = field(default_factory=dict)


class RayFleet:
    """Replicas and writers as actors of this driver: they end with it."""

    def __init__(
        self,
        spec: EngineSpec,
        writer: Callable[[str], PoolWriterSpec],
        shape: ClusterShape,
        *,
        name: str,
        max_failures: int = 3,
        nodes: Callable[[], Nodes] = look,
    ):
        """``writer(name)`` gives a writer's spec. ``name`` is the actors' namespace, and prefixes their names, as Ray's
        dashboard lists them. A replica that dies is started again, up to ``max_failures`` times in a row."""
        self._spec = spec
        self._writer = writer
        self._shape = shape
        self._name = name
        self._max_failures = max_failures
        self._look = nodes
        self._nodes = Nodes()
        self._looked = 0.0
        self._served: list[str] = []  # every node that ever had writers; a node that comes back has another id
        self._writers: list[tuple[str, Any]] = []
        self._coming: dict[Any, str] = {}  # writers until they are heard of, and their nodes
        self._going: dict[Any, str] = {}  # writers of nodes that drain: they store what they have, and get no more
        self._flushing: dict[Any, Any] = {}  # writers that are going → ref of the last flush()
        self._listening: dict[Any, Any] = {}  # ref of a writer's events() → the writer
        self._replicas: dict[int, _Replica] = {}
        self._numbers = 0
        self._starting: dict[Any, int] = {}
        self._inquiry = Inquiry()  # replicas out of reach: what they died of says what becomes of their rows
        self._given_up: set[Any] = set()  # writers that were out of reach for too long, until they are heard of
        self._waiting: list[int] = []  # replicas that are up while there is no writer yet
        self._ever_ready = False
        self._told_draining = False
        self._here = ""

    def start(self) -> None:
        self._here = str(ray.get_runtime_context().get_node_id())
        self._nodes, self._looked = self._look(), time.monotonic()
        for node in self._nodes_for_writers():
            # Before any replica, which could take their CPUs. Another job may have them already: then a writer waits,
            # and nothing is sent to it, nor waits for it, before it lives.
            self._coming |= dict.fromkeys(self._start_writers(node), node)
        for _ in range(self._shape.replicas):
            self._start_replica()

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _nodes_for_writers(self) -> list[str]:
        resources = self._nodes.resources
        return sorted(n for n, have in resources.items() if fits_writers(have, self._shape.writer_cpus))

    def _watch_nodes(self) -> list[FleetEvent]:
        """Writers on nodes that came; those of nodes that went are forgotten, and the replicas told."""
        self._nodes, self._looked = self._look(), time.monotonic()
        wanted = self._nodes_for_writers()
        for node in wanted:
            if node not in self._served:
                # Replicas hear of it when it lives: on a node that is full already it may wait for its CPUs for ever.
                self._coming |= dict.fromkeys(self._start_writers(node), node)
        had = {*self._going.values(), *(node for node, _ in self._writers)}
        gone: list[FleetEvent] = [NodeGone(node) for node in sorted(had) if not self._nodes.is_alive(node)]
        self._coming = {actor: node for actor, node in self._coming.items() if node in wanted}
        self._going = {actor: node for actor, node in self._going.items() if self._nodes.is_alive(node)}
        self._flushing = {actor: ref for actor, ref in self._flushing.items() if actor in self._going}
        left = [(node, actor) for node, actor in self._writers if node in wanted]
        if len(left) < len(self._writers):
            self._going |= {actor: node for node, actor in self._writers if node in self._nodes.draining}
            self._writers = left
            self._tell_replicas()
        for number, replica in list(self._replicas.items()):
            if replica.node and not self._nodes.is_alive(replica.node):
                gone += self._lost(number, "its node is gone", with_node=True)
        for actor in self._going:
            # Again and again until the node is gone, as pages may have been under way; one call at a time, as a store
            # that is slow would have them fill the writer's threads, and nothing would be heard of it.
            last = self._flushing.get(actor)
            if last is None or ray.wait([last], timeout=0)[0]:
                self._flushing[actor] = actor.flush.remote()
        known = {*self._coming, *self._going, *(actor for _, actor in left)}
        self._listening = {ref: actor for ref, actor in self._listening.items() if actor in known}
        self._given_up &= known
        return gone + self._take_leave()

    def _take_leave(self) -> list[FleetEvent]:
        """Replicas of nodes that drain get no more tasks, and others are started in their place."""
        events: list[FleetEvent] = []
        if self._here in self._nodes.draining and not self._told_draining:
            self._told_draining = True
            events.append(Draining())
        for number, replica in list(self._replicas.items()):
            if replica.state == "ready" and replica.node in self._nodes.draining:
                replica.state = "leaving"
                events.append(ReplicaLeaving(number))
                self._start_replica()
            if replica.state == "leaving" and not replica.tasks:
                events += self._remove(number, ReplicaDied(number, "its node drains", blameless=True), flush=True)
        return events

    def _tell_replicas(self) -> None:
        for replica in self._replicas.values():
            if replica.state != "starting":
                replica.actor.set_writers.remote(self._writers)

    # -- actors --------------------------------------------------------------------------------------------------

    def _start_writers(self, node: str) -> list[Any]:
        started = []
        for slot in range(self._shape.writers_per_node):
            name = f"n{len(self._served)}w{slot}"
            actor = start_writer(
                self._writer(name),
                node_id=node,
                num_cpus=self._shape.writer_cpus,
                threads=self._shape.writer_threads,
                name=f"{self._name}/writer/{name}",
                namespace=self._name,
            )
            started.append(actor)
            self._listen(actor)
        self._served.append(node)
        return started

    def _start_replica(self, failures: int = 0) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        actor, group = start_replica(
            self._spec,
            self._writers,
            number,
            placement=self._shape.placement,
            num_cpus=self._shape.replica_cpus,
            resources=self._shape.replica_resources,
            environment=self._shape.replica_env,
            name=f"{self._name}/replica/{number}",
            namespace=self._name,
        )
        self._replicas[number] = _Replica(actor, group, failures)
        self._starting[actor.ready.remote()] = number

    def submit(self, replica: int, task: Task) -> None:
        # The name under which Ray's dashboard lists the call.
        name = f"replica {replica}: task {task.number}, {len(task.rows)} rows from {task.rows[0].row}"
        own = self._replicas[replica]
        own.tasks[own.actor.run.options(name=name).remote(task)] = task

    def poll(self, timeout: float) -> list[FleetEvent]:
        events: list[FleetEvent] = []
        if time.monotonic() - self._looked > NODES_EVERY_S:
            events += self._watch_nodes()
        reached = {n: replica for n, replica in self._replicas.items() if n not in self._inquiry}
        running = {ref: number for number, replica in reached.items() for ref in replica.tasks}
        refs = [*self._starting, *running, *self._listening, *self._inquiry.refs]
        done, _ = ray.wait(refs, num_returns=1, timeout=0 if events else timeout) if refs else ([], [])
        if done:  # and whatever else is there by now, at no further wait
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for number in self._inquiry.overdue():
            late = RayError(f"it was out of reach for {KNOWN_AFTER_S:g} s")
            events += self._died(number, late, cut_off=True)
        for ref in done:
            if ref in self._listening:
                events += self._heard(ref)
            elif ref in self._starting:
                events += self._started(ref)
            elif ref in self._inquiry.refs:
                events += self._known(ref)
            elif ref in running and running[ref] in self._replicas:
                events += self._task_done(ref, running[ref])
        return events

    def _listen(self, actor: Any) -> None:
        self._listening[actor.events.remote(2.0)] = actor

    def _heard(self, ref: Any) -> list[FleetEvent]:
        actor = self._listening.pop(ref, None)
        if actor is None:
            return []  # its node went while others were heard
        events: list[FleetEvent] = []
        try:
            events += ray.get(ref)
            self._given_up.discard(actor)
            if actor in self._coming:
                self._writers.append((self._coming.pop(actor), actor))
                self._tell_replicas()
            events += self._announce()
        except RayError as e:
            # Ray restarts it while its node lives; what it held has no receipt and will be run again.
            what = "is out of reach" if isinstance(e, ActorUnavailableError) else "died"
            log.warning("a writer %s: %s", what, type(e).__name__)
            events += self._watch_nodes()
        if actor in self._coming or actor in self._going or any(actor == listed for _, listed in self._writers):
            self._listen(actor)
        return events

    def _started(self, ref: Any) -> list[FleetEvent]:
        number = self._starting.pop(ref)
        replica = self._replicas[number]
        try:
            replica.node = ray.get(ref)
        except RayError as e:
            return self._failed(number, e)
        replica.actor.set_writers.remote(self._writers)  # the pool may have changed while it started
        replica.state = "ready"
        self._ever_ready = True
        self._waiting.append(number)
        return self._announce()

    def _announce(self) -> list[FleetEvent]:
        """Replicas that are up are given tasks once there is a writer for what they compute."""
        if not self._writers:
            return []
        waiting, self._waiting = self._waiting, []
        return [ReplicaReady(number) for number in waiting if number in self._replicas]

    def _task_done(self, ref: Any, number: int) -> list[FleetEvent]:
        replica = self._replicas[number]
        try:
            result = ray.get(ref)
        except RayError as e:
            return self._failed(number, e)
        del replica.tasks[ref]
        replica.failures = 0
        return [TaskDone(number, result), *self._take_leave()]

    def _failed(self, number: int, error: RayError) -> list[FleetEvent]:
        """A call of a replica failed: it is dead, or out of reach."""
        if not isinstance(error, ActorUnavailableError):
            return self._died(number, error)
        if number not in self._inquiry:
            log.warning("replica %d is out of reach: %s", number, reason_of(error), extra={"replica": number})
            self._inquiry.begin(number, self._replicas[number].actor)
            return [ReplicaUnreached(number)]
        return []

    def _known(self, ref: Any) -> list[FleetEvent]:
        known = self._inquiry.heard(ref)
        if known is None:
            return []
        number, error = known
        if error is None:
            # Its calls are lost, and it may still be at them: another one is given their rows, and this one is ended.
            return self._died(number, RayError("its connection broke, and what it answered is lost"), cut_off=True)
        return self._died(number, error)

    def _died(self, number: int, error: RayError, *, cut_off: bool = False) -> list[FleetEvent]:
        """``cut_off``: it may be alive."""
        events = self._watch_nodes()
        if number in self._replicas:  # else it went with its node, or that drains and it was let go just now
            node = self._replicas[number].node
            with_node = went_with_its_node(error) or (node != "" and node not in self._nodes.resources)
            events += self._lost(number, reason_of(error), with_node=with_node, cut_off=cut_off)
        return events

    def _lost(self, number: int, reason: str, *, with_node: bool, cut_off: bool = False) -> list[FleetEvent]:
        """One report a death: the refs of its other tasks are forgotten with it."""
        replica = self._replicas[number]
        blameless = with_node or cut_off
        # A row that is alone with its engine is to blame, and not the engine.
        alone = any(task.alone for task in replica.tasks.values()) and not cut_off
        in_a_row = replica.failures + (not with_node and not alone)
        hopeless = replica.state == "starting" and not blameless and not self._ever_ready
        again = not hopeless and in_a_row <= self._max_failures and replica.state != "leaving"
        if again:
            self._start_replica(in_a_row)
        told = ReplicaDied(number, reason, fatal=not again and len(self._replicas) == 1, blameless=blameless)
        return self._remove(number, told, flush=False)

    def _remove(self, number: int, told: ReplicaDied, *, flush: bool) -> list[FleetEvent]:
        replica = self._replicas.pop(number)
        self._inquiry.forget(number)
        if flush:
            failures(flushing([replica.actor]), 5.0)
        ray.kill(replica.actor, no_restart=True)
        if replica.group is not None:
            ray.util.remove_placement_group(replica.group)
        return [told]

    # -- the end -------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None, *, hurry: Callable[[], bool] | None = None) -> list[FleetEvent]:
        end = None if timeout is None else time.monotonic() + timeout
        events: list[FleetEvent] = []
        if end is None:
            events += self._flush_whatever_it_takes(hurry)
        else:
            self._flush_by(end)
        # What the flush stored is told by the call that listens now, or by the next one. Where time is short, those
        # that have nothing to tell are not waited for.
        for _ in range(2 if end is None else 1):
            refs = [ref for ref, actor in self._listening.items() if actor not in self._coming]
            patience = None if end is None else min(end - time.monotonic(), 1.0)
            for ref in wait_for_all(refs, patience, hurry)[0]:
                events += self._heard(ref)
        return events

    def _flush_by(self, end: float) -> None:
        # What writers hold is stored at once, beside what replicas still have to hand over.
        early = flushing(self._present_writers())
        failures(flushing(self._started_replicas()), end - time.monotonic())
        failures(early, end - time.monotonic())
        failures(flushing(self._present_writers()), end - time.monotonic())

    def _flush_whatever_it_takes(self, hurry: Callable[[], bool] | None) -> list[FleetEvent]:
        events: list[FleetEvent] = []
        replicas = self._started_replicas()
        for actor, error in flush_until_known(replicas, hurry=hurry).items():
            if replicas[actor] in self._replicas:
                events += self._died(replicas[actor], error, cut_off=isinstance(error, ActorUnavailableError))
        unreached = flush_until_known(self._present_writers(), self._given_up, hurry)
        self._given_up |= {actor for actor, e in unreached.items() if isinstance(e, ActorUnavailableError)}
        if hurry is not None and hurry():
            return events
        # Whether a node is gone decides whether what was there counts as a try of its rows.
        return events + self._watch_nodes()

    def _present_writers(self) -> list[Any]:
        return [*(actor for _, actor in self._writers), *self._going]

    def _started_replicas(self) -> dict[Any, int]:
        """Actor → number."""
        return {r.actor: number for number, r in self._replicas.items() if r.state != "starting"}

    def close(self, *, quickly: bool = False) -> None:
        if not quickly:
            failures({actor.stop.remote(): actor for actor in self._started_replicas()}, CLOSE_S)
            here = {ref: actor for ref, actor in self._listening.items() if actor not in self._coming}
            for actor in here.values():
                actor.hang_up.remote()
            failures(here, CLOSE_S)
        for replica in self._replicas.values():
            ray.kill(replica.actor)
            if replica.group is not None:
                ray.util.remove_placement_group(replica.group)
        for actor in (*self._coming, *self._going, *(actor for _, actor in self._writers)):
            ray.kill(actor)
