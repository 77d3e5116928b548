"""The fleet on a Ray cluster: one actor a replica, writers on every node, all made by the driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.jobs.cores import CoreClaim, omp_binding
from hsx_dist.jobs.fleet import FleetEvent, ReplicaDied, ReplicaReady, TaskDone
from hsx_dist.jobs.tasks import EngineSpec, Task, TaskResult
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.ray_metrics import RayExport
from hsx_dist.writers.ray_pool import RaySender, WriterSpec, start_writer
from hsx_dist.writers.sink import Lost, SinkOptions

log = logging.getLogger(__name__)

#: How often the cluster is asked which nodes it has.
NODES_EVERY_S = 10.0
#: Environment variables that hold or lead to credentials: taken from the driver to every process that opens the store.
CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "GCSFS_", "FSSPEC_")


def credential_environment() -> dict[str, str]:
    """The driver's variables that a store may need. They travel as actor arguments, which Ray shows nowhere."""
    return {k: v for k, v in os.environ.items() if k.startswith(CREDENTIAL_PREFIXES)}


class ReplicaActor:
    """A ``Replica`` in a Ray actor. Its constructor starts the engine."""

    def __init__(
        self,
        spec: EngineSpec,
        writers: list[tuple[str, Any]],
        environment: Mapping[str, str],
        num_cpus: float,
        tags: Mapping[str, str],
    ):
        os.environ.update(environment)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._claim = prepare_cpu(spec.ranks, num_cpus)
        from hsx_dist.jobs.replica import Replica

        self._tags = dict(tags)
        configure_logging(logging.INFO, **tags)
        self._writers = writers
        self._senders: list[RaySender] = []
        self._meter = Meter()
        self._export = RayExport(self._meter, "replica", tags)
        self._replica = Replica(spec, self._sender, self._meter)

    def __repr__(self) -> str:
        # What Ray's log lines and its dashboard call this process.
        return f"hsx replica {self._tags['replica']}"

    def _sender(self) -> RaySender:
        self._senders.append(RaySender(self._writers, self._on_lost, meter=self._meter))
        return self._senders[-1]

    def ready(self) -> str:
        """The node's id, once the engine is up."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: Task) -> TaskResult:
        return self._replica.submit(task).result()

    def flush(self) -> None:
        self._replica.flush()

    def set_writers(self, writers: list[tuple[str, Any]]) -> None:
        """The pool has changed: nodes came, or went."""
        self._writers = writers
        for sender in self._senders:
            sender.update(writers)

    def stop(self) -> None:
        self._replica.close()
        self._export.close()

    def _on_lost(self, lost: Lost) -> None:
        # The driver learns it from the receipts that are missing; this line is for whoever reads the actor's log.
        log.warning("pages of %d segments were not taken by their writer: %s", len(lost.segments), lost.reason)


def prepare_cpu(ranks: int, num_cpus: float) -> CoreClaim | None:
    """On a machine without an accelerator: bind the engine to cores of its own."""
    import torch

    if torch.cuda.is_available() or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return None
    claim = CoreClaim(max(int(num_cpus), 1))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = omp_binding(claim.cores, ranks, max(int(num_cpus), 1))
    return claim


@dataclass(frozen=True)
class ClusterShape:
    """How many actors of which size."""

    replicas: int
    replica_cpus: float
    replica_gpus: float
    replica_resources: Mapping[str, float]
    replica_env: Mapping[str, str]
    writers_per_node: int
    writer_cpus: float
    writer_threads: int


class RayFleet:
    """Replicas and writers as actors of this driver: they end with it."""

    def __init__(
        self,
        spec: EngineSpec,
        writer: Callable[[str], WriterSpec],
        shape: ClusterShape,
        *,
        name: str,
        max_restarts: int = 3,
    ):
        """``writer(name)`` gives a writer's spec. ``name`` prefixes the actors' names on Ray's dashboard."""
        self._spec = spec
        self._writer = writer
        self._shape = shape
        self._name = name
        self._restarts_left = [max_restarts] * shape.replicas
        self._writers: list[tuple[str, Any]] = []
        self._nodes: list[str] = []  # every node that ever had writers; a node that comes back has another id
        self._nodes_seen = 0.0
        self._coming: dict[Any, str] = {}  # writers of nodes that came later, until they are heard of
        self._replicas: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._tasks: dict[Any, int] = {}
        self._listening: dict[Any, Any] = {}  # ref of a writer's events() → the writer

    def start(self) -> None:
        for node in self._nodes_for_writers():
            # Before any replica, which could take their CPUs.
            self._writers += [(node, actor) for actor in self._start_writers(node)]
        for replica in range(self._shape.replicas):
            self._start_replica(replica)

    def _nodes_for_writers(self) -> list[str]:
        self._nodes_seen = time.monotonic()
        return sorted(
            n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0.0) >= self._shape.writer_cpus
        )

    def _watch_nodes(self) -> None:
        """Writers on nodes that came; those of nodes that went are forgotten, and the replicas told."""
        alive = self._nodes_for_writers()
        for node in alive:
            if node not in self._nodes:
                # Replicas hear of it when it lives: on a node that is full already it may wait for its CPUs for ever.
                self._coming |= dict.fromkeys(self._start_writers(node), node)
        self._coming = {actor: node for actor, node in self._coming.items() if node in alive}
        left = [(node, actor) for node, actor in self._writers if node in alive]
        if len(left) < len(self._writers):
            self._writers = left
            self._tell_replicas()
        known = {*self._coming, *(actor for _, actor in left)}
        self._listening = {ref: actor for ref, actor in self._listening.items() if actor in known}

    def _tell_replicas(self) -> None:
        for replica, actor in self._replicas.items():
            if replica not in self._starting.values():
                actor.set_writers.remote(self._writers)

    def _start_writers(self, node: str) -> list[Any]:
        started = []
        for slot in range(self._shape.writers_per_node):
            name = f"n{len(self._nodes)}w{slot}"
            actor = start_writer(
                self._writer(name),
                node_id=node,
                num_cpus=self._shape.writer_cpus,
                threads=self._shape.writer_threads,
                name=f"{self._name}/writer/{name}",
            )
            started.append(actor)
            self._listen(actor)
        self._nodes.append(node)
        return started

    def _start_replica(self, replica: int) -> None:
        shape = self._shape
        # As an argument, not as a runtime_env: that one is shown on Ray's dashboard.
        environment = {**credential_environment(), **shape.replica_env}
        actor = (
            ray.remote(ReplicaActor)
            .options(
                name=f"{self._name}/replica/{replica}",
                num_cpus=shape.replica_cpus,
                num_gpus=shape.replica_gpus,
                resources=dict(shape.replica_resources) or None,
                max_concurrency=8,
            )
            .remote(
                self._spec,
                self._writers,
                environment,
                shape.replica_cpus,
                {"run": self._spec.output, "replica": str(replica)},
            )
        )
        self._replicas[replica] = actor
        self._starting[actor.ready.remote()] = replica

    def submit(self, replica: int, task: Task) -> None:
        # The name under which Ray's dashboard lists the call.
        name = f"replica {replica}: task {task.number}, {len(task.rows)} rows from {task.rows[0].row}"
        self._tasks[self._replicas[replica].run.options(name=name).remote(task)] = replica

    def poll(self, timeout: float) -> list[FleetEvent]:
        if time.monotonic() - self._nodes_seen > NODES_EVERY_S:
            self._watch_nodes()
        refs = [*self._starting, *self._tasks, *self._listening]
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout)
        if done:  # and whatever else is there by now, at no further wait
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        events: list[FleetEvent] = []
        for ref in done:
            if ref in self._listening:
                events += self._heard(ref)
            elif ref in self._starting:
                events += self._started(ref)
            elif ref in self._tasks:
                events += self._task_done(ref)
        return events

    def _listen(self, actor: Any) -> None:
        self._listening[actor.events.remote(2.0)] = actor

    def _heard(self, ref: Any) -> list[FleetEvent]:
        actor = self._listening.pop(ref, None)
        if actor is None:
            return []  # its node went while others were heard
        try:
            events = list(ray.get(ref))
            if actor in self._coming:
                self._writers.append((self._coming.pop(actor), actor))
                self._tell_replicas()
        except RayError as e:
            # Ray restarts it while its node lives; what it held has no receipt and will be run again.
            log.warning("a writer died: %s", type(e).__name__)
            self._watch_nodes()
            events = []
        if actor in self._coming or any(actor == listed for _, listed in self._writers):
            self._listen(actor)
        return events

    def _started(self, ref: Any) -> list[FleetEvent]:
        replica = self._starting.pop(ref)
        try:
            ray.get(ref)
        except RayError as e:
            return self._died(replica, reason_of(e), starting=True)
        self._replicas[replica].set_writers.remote(self._writers)  # the pool may have changed while it started
        return [ReplicaReady(replica)]

    def _task_done(self, ref: Any) -> list[FleetEvent]:
        replica = self._tasks.pop(ref)
        try:
            return [TaskDone(replica, ray.get(ref))]
        except RayError as e:
            return self._died(replica, reason_of(e), starting=False)

    def _died(self, replica: int, reason: str, *, starting: bool) -> list[FleetEvent]:
        """One report a death: the refs of its other tasks are forgotten with it."""
        self._tasks = {ref: r for ref, r in self._tasks.items() if r != replica}
        ray.kill(self._replicas[replica], no_restart=True)
        self._restarts_left[replica] -= 1
        if starting or self._restarts_left[replica] < 0:
            del self._replicas[replica]
            return [ReplicaDied(replica, reason, fatal=not self._replicas)]
        self._start_replica(replica)
        return [ReplicaDied(replica, reason)]

    def flush(self) -> list[FleetEvent]:
        for replica, actor in list(self._replicas.items()):
            if replica not in self._starting.values():
                self._attempt(actor.flush.remote())
        for _, actor in self._writers:
            self._attempt(actor.flush.remote())
        events: list[FleetEvent] = []
        # What the flush stored is told by the call that listens now, or by the next one.
        for _ in range(2):
            for ref in list(self._listening):
                events += self._heard(ref)
        return events

    def _attempt(self, ref: Any) -> None:
        try:
            ray.get(ref)
        except RayError as e:
            log.warning("flush: %s", type(e).__name__)  # what it held is run again

    def close(self) -> None:
        for replica, actor in self._replicas.items():
            if replica in self._starting.values():
                ray.kill(actor)
            else:
                self._attempt(actor.stop.remote())
                ray.kill(actor)
        for actor in (*self._coming, *(actor for _, actor in self._writers)):
            ray.kill(actor)


def reason_of(error: RayError) -> str:
    """A line that says why an actor or its task failed: our own error where one of ours is the cause."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HsxError):
        return str(cause)
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("hsx_dist.errors.")]
        return ours[-1].partition(": ")[2] if ours else lines[0]
    return str(error).strip().splitlines()[-1]


def check_output(output: str, nodes: int) -> None:
    """Raises ConfigError for an output on a node's own disk when there are several nodes."""
    local = "://" not in output or output.startswith(("file://", "local://", "memory://"))
    if local and nodes > 1:
        raise ConfigError(
            f"output: expected a place that all {nodes} nodes share, came {output!r}, which each node would take for a "
            "disk of its own; use an object store's URL (s3://…, gs://…), or set store.shared=true if it is a shared "
            "file system"
        )


def affordable_credit(config: ExtractConfig, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of credit of one writer: as configured, or what keeps all of a node's below half of its object store, which
    spills to disk when it is full rather than say so.

    Raises:
        ConfigError: that half has no room for two pages a writer.
    """
    wanted = int(config.writers.credit_bytes)
    smallest = min(int(n["Resources"].get("object_store_memory", 0)) for n in nodes)
    most = smallest // 2 // config.writers.per_node
    if most < 2 * int(config.page_bytes):
        raise ConfigError(
            f"writers: expected an object store that holds four pages ({4 * int(config.page_bytes)} bytes) for each of "
            f"{config.writers.per_node} writers on every node, came one of {smallest} bytes; start Ray with a larger "
            "--object-store-memory, or lower page_bytes or writers.per_node"
        )
    if most < wanted:
        log.warning(
            "writers.credit_bytes %d is lowered to %d: half of the smallest object store, %d bytes, is shared by %d "
            "writers", wanted, most, smallest, config.writers.per_node
        )  # fmt: skip
    return min(wanted, most)


def has_room_for_writers(node: Mapping[str, float], cpus: float) -> bool:
    """Whether writers are made on a node. A head that gives its CPUs to nobody (``--num-cpus=0``) gets none."""
    return node.get("CPU", 0) >= cpus


def check_room(config: ExtractConfig, gpus: float, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError when the nodes (their Ray resources) have no room for ``min_replicas``, with their writers.

    Ray would let the replicas wait for ever, and say so to nobody who looks at the job.
    """
    wanted = {**config.replica.resources, "CPU": config.replica.num_cpus, "GPU": gpus}
    wanted = {name: amount for name, amount in wanted.items() if amount}
    writers = config.writers.per_node * config.writers.num_cpus
    if not any(has_room_for_writers(node, writers) for node in nodes):
        raise ConfigError(
            f"writers: expected a node with {writers:g} CPUs for its writers, came nodes with "
            f"{[node.get('CPU', 0) for node in nodes]}; lower writers.per_node or writers.num_cpus"
        )
    room = 0
    for node in nodes:
        taken = writers if has_room_for_writers(node, writers) else 0
        free = {**node, "CPU": node.get("CPU", 0) - taken}
        fits = [int(free.get(name, 0) / amount + 1e-9) for name, amount in wanted.items()]
        room += min(fits, default=config.min_replicas)
    if room < config.min_replicas:
        have = ", ".join(
            "{" + ", ".join(f"{name}: {node.get(name, 0):g}" for name in sorted(wanted)) + "}" for node in nodes
        )
        raise ConfigError(
            f"min_replicas: expected room for {config.min_replicas} replicas of "
            f"{', '.join(f'{amount:g} {name}' for name, amount in sorted(wanted.items()))} each, beside writers of "
            f"{writers:g} CPUs on each node, came nodes with {have}: room for {room}; lower replica.num_cpus, "
            "writers.num_cpus or min_replicas, or add nodes"
        )


def ray_fleet(config: ExtractConfig, spec: EngineSpec, options: Callable[[str], SinkOptions], *, name: str) -> RayFleet:
    """The fleet that a configuration asks for, on the cluster that this driver is connected to.

    Raises:
        ConfigError: the output is a disk of one node's own, or no node can ever hold a replica.
    """
    nodes = [n for n in ray.nodes() if n["Alive"]]
    if not config.store.shared:
        check_output(config.output, len(nodes))
    gpus = config.replica.num_gpus
    if gpus is None:
        gpus = float(spec.ranks) if ray.cluster_resources().get("GPU", 0) else 0.0
    check_room(config, gpus, [n["Resources"] for n in nodes])
    shape = ClusterShape(
        replicas=config.max_replicas,
        replica_cpus=config.replica.num_cpus,
        replica_gpus=gpus,
        replica_resources=config.replica.resources,
        replica_env=config.replica.env,
        writers_per_node=config.writers.per_node,
        writer_cpus=config.writers.num_cpus,
        writer_threads=config.writers.threads,
    )
    credit = affordable_credit(config, nodes)
    environment = credential_environment()

    def writer(writer_name: str) -> WriterSpec:
        return WriterSpec(
            output=config.output,
            storage_options=config.store.storage_options,
            backend=config.store.backend,
            retry_seconds=config.store.retry_seconds,
            environment=environment,
            options=options(writer_name),
            credit_bytes=credit,
            tags={"run": spec.output, "writer": writer_name},
        )

    return RayFleet(spec, writer, shape, name=name)
