"""The state machine of writers, as a table, and the pool of a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hsx_dist.fleet.nodes import Nodes
from hsx_dist.fleet.writer_states import AFTER, WriterInput, WriterPool, WriterState

STARTING, READY, DRAINING, UNREACHABLE, GONE = WriterState
HEARD, UNREACHED, DRAINS, LEFT = WriterInput
CPUS = {"CPU": 4.0}


@pytest.mark.parametrize(
    ("state", "after"),  # after heard, unreached, drains, left
    [
        (STARTING, (READY, STARTING, GONE, GONE)),
        (READY, (READY, UNREACHABLE, DRAINING, GONE)),
        (DRAINING, (DRAINING, DRAINING, DRAINING, GONE)),
        (UNREACHABLE, (READY, UNREACHABLE, DRAINING, GONE)),
        (GONE, (GONE, GONE, GONE, GONE)),
    ],
)
def test_each_state_after_each_input(state, after):
    assert tuple(AFTER.get((state, happened), state) for happened in WriterInput) == after


def pool(**states):
    """A writer of the same name on each node, each in a state."""
    made = WriterPool(1.0)
    way = {STARTING: (), READY: (HEARD,), DRAINING: (HEARD, DRAINS), UNREACHABLE: (HEARD, UNREACHED)}
    made.new_nodes(Nodes(dict.fromkeys(states, CPUS)))
    for node, state in states.items():
        made.add(node, node)
        for happened in way[state]:
            made.apply(node, happened)
        assert made.state(node) is state
    return made


def test_pages_go_to_writers_that_were_heard_and_whose_nodes_stay():
    made = pool(a=STARTING, b=READY, c=DRAINING, d=UNREACHABLE)
    assert made.listed == [("b", "b"), ("d", "d")]
    assert made.present == ["b", "c", "d"]
    assert made.handles == ["a", "b", "c", "d"]
    assert made.of(DRAINING) == {"c": "c"}


@pytest.mark.parametrize(
    ("nodes", "dead", "listed", "draining"),
    [
        (Nodes(dict.fromkeys("abcd", CPUS)), [], "bd", "c"),
        (Nodes(dict.fromkeys("acd", CPUS)), ["b"], "d", "c"),
        (Nodes({"d": CPUS}), ["b", "c"], "d", ""),  # no pages were lost with a: it held none
        (Nodes({"a": CPUS}, frozenset("bcd")), [], "", "bcd"),
        (Nodes({"a": CPUS, "b": {"CPU": 0.0}, "d": CPUS}, frozenset("c")), [], "d", "c"),
        (Nodes(), ["b", "c", "d"], "", ""),
    ],
)
def test_a_look_at_the_cluster(nodes, dead, listed, draining):
    made = pool(a=STARTING, b=READY, c=DRAINING, d=UNREACHABLE)
    assert made.follow(nodes) == dead
    assert [node for node, _ in made.listed] == list(listed)
    assert list(made.of(DRAINING)) == list(draining)
    assert made.state("a") is (STARTING if "a" in nodes.resources else GONE)


def test_each_node_gets_its_writers_once():
    made = WriterPool(1.0)
    assert made.new_nodes(Nodes({"b": CPUS, "a": CPUS, "head": {"CPU": 0.0}})) == [(0, "a"), (1, "b")]
    assert made.new_nodes(Nodes({"a": CPUS, "c": CPUS}, frozenset("b"))) == [(2, "c")]


def test_the_state_machines_need_no_ray():
    code = "import hsx_dist.fleet.writer_states, hsx_dist.fleet.replica_states, sys; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]
