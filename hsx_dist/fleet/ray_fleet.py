"""The fleet on a Ray cluster: one actor for each replica, and writers on every node. The driver owns all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from hsx_dist.fleet.actor_liveness import KNOWN_AFTER_S, Inquiry, failures, flush_until_known, flushing, wait_for_all
from hsx_dist.fleet.base import MAX_FAILURES, Draining, FleetEvent, NodeGone
from hsx_dist.fleet.nodes import Nodes, look
from hsx_dist.fleet.placement import Placement
from hsx_dist.fleet.ray_errors import reason_of, went_with_its_node
from hsx_dist.fleet.replica_actor import start_replica
from hsx_dist.fleet.replica_states import (
    CallFailed,
    EndReplica,
    NodeDrains,
    ReplicaInput,
    ReplicaLost,
    ReplicaPhase,
    ReplicaState,
    Started,
    StartReplica,
    TaskAnswered,
    TaskGiven,
    WritersReady,
    after,
)
from hsx_dist.fleet.tasks import EngineSpec, Task
from hsx_dist.fleet.writer_states import WriterInput, WriterPool, WriterState
from hsx_dist.logger import get_logger
from hsx_dist.writers.events import Lost, Unusable
from hsx_dist.writers.ray_pool import PoolWriterSpec, start_writer

log = get_logger(__name__)

#: Seconds between two snapshots of the cluster's nodes.
NODES_EVERY_S = 5.0
#: Seconds for engines to shut down before they are killed. All their pages are stored by then.
CLOSE_S = 30.0


@dataclass(frozen=True)
class ClusterShape:
    """Number and size of the actors. ``replicas``: number of started replicas. Replicas without free resources wait, so
    that an autoscaler adds nodes."""

    replicas: int
    placement: Placement
    replica_cpus: float
    replica_resources: Mapping[str, float]
    replica_env: Mapping[str, str]
    writers_per_node: int
    writer_cpus: float
    writer_threads: int


#: A replica's actor and its placement group.
_Actor = tuple[Any, Any]
#: Handler of a call's answer; takes the ref.
_Handler = Callable[[Any], list[FleetEvent]]


class RayFleet:
    """Replicas and writers as actors of this driver. They end with the driver.

    ``replicas`` and ``writers`` hold their states, whose transitions need no Ray. This class makes Ray's calls. Only
    the driver's thread uses it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        writer: Callable[[str], PoolWriterSpec],
        shape: ClusterShape,
        *,
        name: str,
        nodes: Callable[[], Nodes] = look,
    ):
        """``writer(name)`` returns a writer's spec. ``name``: namespace of the actors, and prefix of their names on
        Ray's dashboard."""
        self._spec = spec
        self._writer = writer
        self._shape = shape
        self._name = name
        self._look = nodes
        self._nodes = Nodes()
        self._looked = 0.0
        self._here = ""
        self._told_draining = False
        self.writers = WriterPool(shape.writer_cpus)
        #: Replicas that are not gone, by number.
        self.replicas: dict[int, ReplicaState] = {}
        self._numbers = 0
        self._ever_ready = False
        self._actors: dict[int, _Actor] = {}
        #: Open calls of replicas: ref → number of the replica, handler of the answer.
        self._calls: dict[Any, tuple[int, _Handler]] = {}
        self._listening: dict[Any, Any] = {}  # ref of a writer's events() → the writer
        self._unusable = ""  # why the last unusable writer is unusable
        self._flushing: dict[Any, Any] = {}  # writers whose node drains → ref of the last flush()
        self._inquiry = Inquiry()  # unreachable replicas: the cause of death decides what happens to their rows

    def actor(self, number: int) -> Any:
        """The handle of a replica."""
        return self._actors[number][0]

    def start(self) -> None:
        self._here = str(ray.get_runtime_context().get_node_id())
        self._nodes, self._looked = self._look(), time.monotonic()
        # Writers start first, because replicas could take their CPUs. If another job has these CPUs, a writer waits in
        # Ray. No pages are sent to it, and no call waits for it, until it has answered.
        self._start_writers()
        for _ in range(self._shape.replicas):
            self._start_replica()

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _watch_nodes(self) -> list[FleetEvent]:
        """Start writers on new nodes, forget the writers of dead nodes, and send the new list to the replicas."""
        self._nodes, self._looked = self._look(), time.monotonic()
        self._start_writers()
        listed = self.writers.listed
        events: list[FleetEvent] = [NodeGone(node) for node in self.writers.follow(self._nodes)]
        events += self._without_writers()
        if self.writers.listed != listed:
            self._send_writers_to_replicas()
        for number, replica in list(self.replicas.items()):
            if replica.node and not self._nodes.is_alive(replica.node):
                events += self._lost(number, "its node is dead", with_node=True)
        draining = self.writers.of(WriterState.DRAINING)
        self._flushing = {actor: ref for actor, ref in self._flushing.items() if actor in draining}
        for actor in draining:
            # Repeated until the node is gone, as pages may be under way. One call at a time: with a slow store several
            # calls would fill the writer's threads, and block its other answers.
            last = self._flushing.get(actor)
            if last is None or ray.wait([last], timeout=0)[0]:
                self._flushing[actor] = actor.flush.remote()
        known = set(self.writers.handles)
        self._listening = {ref: actor for ref, actor in self._listening.items() if actor in known}
        return events + self._take_leave()

    def _take_leave(self) -> list[FleetEvent]:
        """Stop giving tasks to replicas on draining nodes, and start other replicas."""
        events: list[FleetEvent] = []
        if self._here in self._nodes.draining and not self._told_draining:
            self._told_draining = True
            events.append(Draining())
        for number, replica in list(self.replicas.items()):
            if replica.node in self._nodes.draining:
                events += self._apply(number, NodeDrains())
        return events

    def _send_writers_to_replicas(self) -> None:
        for number, replica in self.replicas.items():
            if replica.node:
                self.actor(number).set_writers.remote(self.writers.listed)

    # -- actors --------------------------------------------------------------------------------------------------

    def _start_writers(self) -> None:
        """Start writers on each node that has none. Replicas get a writer's handle after its first answer."""
        for order, node in self.writers.new_nodes(self._nodes):
            for slot in range(self._shape.writers_per_node):
                name = f"n{order}w{slot}"
                actor = start_writer(
                    self._writer(name),
                    node_id=node,
                    num_cpus=self._shape.writer_cpus,
                    threads=self._shape.writer_threads,
                    name=f"{self._name}/writer/{name}",
                    namespace=self._name,
                )
                self.writers.add(actor, node)
                self._listen(actor)

    def _start_replica(self, failures: int = 0) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        self._actors[number] = start_replica(
            self._spec,
            self.writers.listed,
            number,
            placement=self._shape.placement,
            num_cpus=self._shape.replica_cpus,
            resources=self._shape.replica_resources,
            environment=self._shape.replica_env,
            name=f"{self._name}/replica/{number}",
            namespace=self._name,
        )
        self.replicas[number] = ReplicaState(number, failures)
        self._calls[self.actor(number).ready.remote()] = (number, partial(self._started, number))

    def _end_replica(self, number: int, *, flush: bool) -> None:
        actor, group = self._actors.pop(number)
        self._inquiry.forget(number)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != number}
        if flush:
            failures(flushing([actor]), 5.0)
        ray.kill(actor, no_restart=True)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _apply(self, number: int, happened: ReplicaInput) -> list[FleetEvent]:
        """Apply one transition of a replica, and its actions. Does nothing for a replica that is gone."""
        if number not in self.replicas:
            return []
        state, actions = after(self.replicas[number], happened, max_failures=MAX_FAILURES)
        self.replicas[number] = state
        if state.phase is ReplicaPhase.GONE:
            del self.replicas[number]
        events: list[FleetEvent] = []
        for action in actions:
            match action:
                case StartReplica(failures=so_far):
                    self._start_replica(so_far)
                case EndReplica(flush=flush):
                    self._end_replica(number, flush=flush)
                case _:
                    events.append(action)
        return events

    # -- calls and their answers ---------------------------------------------------------------------------------

    def submit(self, replica: int, task: Task) -> None:
        # The call's name on Ray's dashboard.
        name = f"replica {replica}: task {task.number}, {len(task.rows)} rows from {task.rows[0].row}"
        ref = self.actor(replica).run.options(name=name).remote(task)
        self._calls[ref] = (replica, partial(self._task_done, replica))
        self._apply(replica, TaskGiven(task))

    def poll(self, timeout: float) -> list[FleetEvent]:
        events: list[FleetEvent] = []
        if time.monotonic() - self._looked > NODES_EVERY_S:
            events += self._watch_nodes()
        # Calls of an unreachable replica have failed. ``_inquiry`` polls whether it is alive.
        calls = [ref for ref, (number, _) in self._calls.items() if number not in self._inquiry]
        refs = [*calls, *self._listening, *self._inquiry.refs]
        done, _ = ray.wait(refs, num_returns=1, timeout=0 if events else timeout) if refs else ([], [])
        if done:  # also the calls that have completed since, without a further wait
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for number in self._inquiry.overdue():
            late = RayError(f"it was unreachable for {KNOWN_AFTER_S:g} s")
            events += self._died(number, late, cut_off=True)
        for ref in done:
            if ref in self._listening:
                events += self._heard(ref)
            elif ref in self._inquiry.refs:
                events += self._known(ref)
            elif ref in self._calls:
                events += self._calls.pop(ref)[1](ref)
        return events

    def _listen(self, actor: Any) -> None:
        self._listening[actor.events.remote(2.0)] = actor

    def _heard(self, ref: Any) -> list[FleetEvent]:
        """Take a writer's answer."""
        actor = self._listening.pop(ref, None)
        if actor is None:
            return []  # the writer's node died while other answers were read
        events: list[FleetEvent] = []
        try:
            heard = ray.get(ref)
            if unusable := next((e for e in heard if isinstance(e, Unusable)), None):
                return self._drop(actor, unusable.reason)
            events += heard
            starting = self.writers.state(actor) is WriterState.STARTING
            self.writers.apply(actor, WriterInput.HEARD)
            if starting:
                self._send_writers_to_replicas()
            events += self._announce()
        except RayError as e:
            # Ray restarts the writer while its node is alive. Samples that it held have no receipt, and are computed
            # again.
            what = "is unreachable" if isinstance(e, ActorUnavailableError) else "died"
            log.warning("a writer %s: %s", what, type(e).__name__)
            events += self._watch_nodes()
        if self.writers.state(actor) is not WriterState.GONE:
            self._listen(actor)
        return events

    def _drop(self, actor: Any, reason: str) -> list[FleetEvent]:
        """Use a writer no more that cannot open the run's store. Replicas on its node send to other nodes' writers."""
        log.error("a writer is not used: %s", reason)
        self._unusable = reason
        self.writers.apply(actor, WriterInput.LEFT)
        ray.kill(actor)
        self._send_writers_to_replicas()
        return self._without_writers()

    def _without_writers(self) -> list[FleetEvent]:
        """Return the event that ends the job if no writer takes pages, and some could not open the run's store.

        Before the first replica is ready, writers that start are waited for: nothing is lost meanwhile."""
        ready = any(replica.phase is ReplicaPhase.READY for replica in self.replicas.values())
        usable = self.writers.listed if ready else self.writers.handles
        return [Lost((), self._unusable, fatal=True)] if self._unusable and not usable else []

    def waits_for(self) -> str:
        reasons = []
        if not self._ever_ready:
            reasons.append("engines load, or wait for the cluster's resources (see Ray's dashboard)")
        if not self.writers.listed:
            reasons.append("writers start, or wait for free CPUs")
            if self._unusable:
                reasons.append(f"a writer is not used: {self._unusable}")
        return "; ".join(reasons) or "engines are replaced"

    def _started(self, number: int, ref: Any) -> list[FleetEvent]:
        try:
            node = ray.get(ref)
        except RayError as e:
            return self._failed(number, e)
        self.actor(number).set_writers.remote(self.writers.listed)  # the pool may have changed while it started
        self._ever_ready = True
        return [*self._apply(number, Started(node)), *self._announce()]

    def _announce(self) -> list[FleetEvent]:
        """Report the started replicas as ready if a writer is up."""
        if not self.writers.listed:
            return []
        return [event for number in list(self.replicas) for event in self._apply(number, WritersReady())]

    def _task_done(self, number: int, ref: Any) -> list[FleetEvent]:
        try:
            result = ray.get(ref)
        except RayError as e:
            return self._failed(number, e)
        return self._apply(number, TaskAnswered(result))

    def _failed(self, number: int, error: RayError) -> list[FleetEvent]:
        """Handle a failed call of a replica: it is dead, or unreachable."""
        if not isinstance(error, ActorUnavailableError):
            return self._died(number, error)
        if number not in self._inquiry:
            log.warning("replica %d is unreachable: %s", number, reason_of(error), extra={"replica": number})
            self._inquiry.begin(number, self.actor(number))
        return self._apply(number, CallFailed())

    def _known(self, ref: Any) -> list[FleetEvent]:
        known = self._inquiry.heard(ref)
        if known is None:
            return []
        number, error = known
        if error is None:
            # The replica is alive, but its answers are lost, and it may still run the tasks. It is killed, and another
            # replica gets the rows.
            return self._died(number, RayError("its connection broke, and its answers are lost"), cut_off=True)
        return self._died(number, error)

    def _died(self, number: int, error: RayError, *, cut_off: bool = False) -> list[FleetEvent]:
        """Handle a replica's death. ``cut_off``: the connection is lost; the replica may be alive."""
        events = self._watch_nodes()
        if number in self.replicas:  # else it was ended with its node, dead or draining
            node = self.replicas[number].node
            with_node = went_with_its_node(error) or (node != "" and node not in self._nodes.resources)
            events += self._lost(number, reason_of(error), with_node=with_node, cut_off=cut_off)
        return events

    def _lost(self, number: int, reason: str, *, with_node: bool, cut_off: bool = False) -> list[FleetEvent]:
        last = len(self.replicas) == 1
        lost = ReplicaLost(reason, with_node, cut_off, hopeless=not self._ever_ready, last=last)
        return self._apply(number, lost)

    # -- the end -------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None, *, hurry: Callable[[], bool] | None = None) -> list[FleetEvent]:
        end = None if timeout is None else time.monotonic() + timeout
        events: list[FleetEvent] = []
        if end is None:
            events += self._flush_replicas_and_writers(hurry)
        else:
            self._flush_by(end)
        # Receipts of the flush arrive with the open call of ``events``, or with the next one. With a time limit there
        # is one round of at most a second: writers without events are not waited for.
        for _ in range(2 if end is None else 1):
            refs = self._answering()
            patience = None if end is None else min(end - time.monotonic(), 1.0)
            for ref in wait_for_all(refs, patience, hurry)[0]:
                events += self._heard(ref)
        return events

    def _answering(self) -> dict[Any, Any]:
        """Return ref → writer, for the writers that have answered once. The others may wait for their CPUs."""
        starting = self.writers.of(WriterState.STARTING)
        return {ref: actor for ref, actor in self._listening.items() if actor not in starting}

    def _flush_by(self, end: float) -> None:
        # Writers store their pages while replicas ship the rest.
        early = flushing(self.writers.present)
        failures(flushing(self._started_replicas()), end - time.monotonic())
        failures(early, end - time.monotonic())
        failures(flushing(self.writers.present), end - time.monotonic())

    def _flush_replicas_and_writers(self, hurry: Callable[[], bool] | None) -> list[FleetEvent]:
        events: list[FleetEvent] = []
        replicas = self._started_replicas()
        for actor, error in flush_until_known(replicas, hurry=hurry).items():
            if replicas[actor] in self.replicas:
                events += self._died(replicas[actor], error, cut_off=isinstance(error, ActorUnavailableError))
        given_up = self.writers.of(WriterState.UNREACHABLE)
        for actor, e in flush_until_known(self.writers.present, given_up, hurry).items():
            if isinstance(e, ActorUnavailableError):
                self.writers.apply(actor, WriterInput.UNREACHED)
        if hurry is not None and hurry():
            return events
        # A death with its node does not count as a try of the rows.
        return events + self._watch_nodes()

    def _started_replicas(self) -> dict[Any, int]:
        """Actor → number."""
        return {self.actor(number): number for number, replica in self.replicas.items() if replica.node}

    def close(self, *, quickly: bool = False) -> None:
        if not quickly:
            failures({actor.stop.remote(): actor for actor in self._started_replicas()}, CLOSE_S)
            here = self._answering()
            for actor in here.values():
                actor.hang_up.remote()
            failures(here, CLOSE_S)
        for actor, group in self._actors.values():
            ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)
        for actor in self.writers.handles:
            ray.kill(actor)
