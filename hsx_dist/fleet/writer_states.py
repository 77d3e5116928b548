"""The state machine of writers, from the driver's side. Does not use Ray.

``AFTER`` is the state machine of one writer. ``WriterPool`` applies it to all writers of a run, and decides which nodes
get writers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from hsx_dist.fleet.capacity import fits_writers
from hsx_dist.fleet.nodes import Nodes


class WriterState(Enum):
    STARTING = auto()  #: no answer yet: on a full node it may wait for CPUs forever, so no pages are sent to it
    READY = auto()
    DRAINING = auto()  #: its node drains: it stores its pages, and gets no new ones
    UNREACHABLE = auto()  #: a flush timed out: it stays listed, and the next flush calls it once
    GONE = auto()


class WriterInput(Enum):
    HEARD = auto()  #: it answered
    UNREACHED = auto()  #: a flush could not reach it for the time that Ray needs to detect a death
    DRAINS = auto()  #: its node drains
    LEFT = auto()  #: its node is dead, or gets no writers any more


#: (state, input) → state. Other pairs change nothing.
AFTER: dict[tuple[WriterState, WriterInput], WriterState] = {
    (WriterState.STARTING, WriterInput.HEARD): WriterState.READY,
    (WriterState.STARTING, WriterInput.DRAINS): WriterState.GONE,
    (WriterState.STARTING, WriterInput.LEFT): WriterState.GONE,
    (WriterState.READY, WriterInput.UNREACHED): WriterState.UNREACHABLE,
    (WriterState.READY, WriterInput.DRAINS): WriterState.DRAINING,
    (WriterState.READY, WriterInput.LEFT): WriterState.GONE,
    (WriterState.UNREACHABLE, WriterInput.HEARD): WriterState.READY,
    (WriterState.UNREACHABLE, WriterInput.DRAINS): WriterState.DRAINING,
    (WriterState.UNREACHABLE, WriterInput.LEFT): WriterState.GONE,
    (WriterState.DRAINING, WriterInput.LEFT): WriterState.GONE,
}

#: Writers that pages are sent to.
LISTED = {WriterState.READY, WriterState.UNREACHABLE}
#: Writers that hold pages.
PRESENT = {*LISTED, WriterState.DRAINING}


@dataclass(slots=True)
class PoolWriter:
    """A writer's node and state."""

    node: str
    state: WriterState = WriterState.STARTING


class WriterPool:
    """All writers of a run, by handle."""

    def __init__(self, cpus: float):
        """``cpus``: CPUs that a node needs for its writers."""
        self._cpus = cpus
        self._writers: dict[Any, PoolWriter] = {}
        #: All nodes that ever had writers. A node that joins again has another id.
        self._served: list[str] = []

    @property
    def listed(self) -> list[tuple[str, Any]]:
        """(node, handle) of each writer to which pages are sent."""
        return [(writer.node, handle) for handle, writer in self._writers.items() if writer.state in LISTED]

    @property
    def present(self) -> list[Any]:
        """Handles of writers that hold pages."""
        return [handle for handle, writer in self._writers.items() if writer.state in PRESENT]

    @property
    def handles(self) -> list[Any]:
        return list(self._writers)

    def of(self, state: WriterState) -> dict[Any, str]:
        """Handle → node of the writers in a state."""
        return {handle: writer.node for handle, writer in self._writers.items() if writer.state is state}

    def state(self, handle: Hashable) -> WriterState:
        writer = self._writers.get(handle)
        return WriterState.GONE if writer is None else writer.state

    def add(self, handle: Hashable, node: str) -> None:
        self._writers[handle] = PoolWriter(node)

    def new_nodes(self, nodes: Nodes) -> list[tuple[int, str]]:
        """Return (number, node) of each node that needs writers now."""
        new = sorted(node for node in nodes.resources if self._is_for_writers(node, nodes) and node not in self._served)
        self._served += new
        return [(self._served.index(node), node) for node in new]

    def apply(self, handle: Hashable, happened: WriterInput) -> None:
        """Apply one transition of a writer. A writer that is gone is forgotten."""
        if (writer := self._writers.get(handle)) is not None:
            writer.state = AFTER.get((writer.state, happened), writer.state)
            if writer.state is WriterState.GONE:
                del self._writers[handle]

    def follow(self, nodes: Nodes) -> list[str]:
        """Apply a snapshot of the cluster. Returns the dead nodes whose writers held pages."""
        dead = {w.node for w in self._writers.values() if w.state in PRESENT and not nodes.is_alive(w.node)}
        for handle, writer in list(self._writers.items()):
            if writer.node in nodes.draining:
                self.apply(handle, WriterInput.DRAINS)
            elif not self._is_for_writers(writer.node, nodes):
                self.apply(handle, WriterInput.LEFT)
        return sorted(dead)

    def _is_for_writers(self, node: str, nodes: Nodes) -> bool:
        have = nodes.resources.get(node)
        return have is not None and fits_writers(have, self._cpus)
