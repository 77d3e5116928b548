"""What dies in mid run: a replica, a writer. Real Ray, real vLLM, SIGKILL; nothing is lost and nothing comes twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray

from hsx_dist.config import load_config
from hsx_dist.jobs import extract as extracting
from hsx_dist.jobs.fleet import TaskDone
from hsx_dist.reading import open_run
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.integration.oracle import Oracle


class Killing:
    """A fleet that kills one process when the first task comes back: work is under way, pages are with the writer."""

    def __init__(self, fleet, victim):
        self.fleet = fleet
        self.victim = victim
        self.killed = None

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def poll(self, timeout):
        events = self.fleet.poll(timeout)
        if self.killed is None and any(isinstance(e, TaskDone) for e in events):
            self.killed = self.victim(self.fleet)
            os.kill(self.killed, signal.SIGKILL)
        return events


def replica_process(fleet) -> int:
    return ray.get(fleet._replicas[0].__ray_call__.remote(lambda _: os.getpid()))


def writer_process(fleet) -> int:
    return ray.get(fleet._writers[0][1].__ray_call__.remote(lambda _: os.getpid()))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(2)
    found = {f"k{i:02d}": rng.integers(0, 300, int(n)).tolist() for i, n in enumerate(rng.integers(1, 200, 48))}
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": k, "token_ids": ids}) + "\n" for k, ids in found.items()))
    return path, found


@pytest.mark.parametrize("victim", [replica_process, writer_process])
def test_a_process_that_is_killed_costs_no_row(victim, rows, tiny_model_path, tmp_path, monkeypatch):
    path, wanted = rows
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # the extraction starts a cluster of its own
    config = load_config(
        None,
        (),
        model=str(tiny_model_path),
        layers=[0, "last"],
        output=str(tmp_path / "run"),
        input={"path": str(path)},
        engine_kwargs={"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "block_size": 32},
        writers={"num_cpus": 0},
        task_rows=4,
    )
    kill: list[Killing] = []
    real = extracting.make_fleet

    def make_fleet(*arguments):
        kill.append(Killing(real(*arguments), victim))
        return kill[0]

    monkeypatch.setattr(extracting, "make_fleet", make_fleet)
    try:
        summary = extracting.run_extract(config, base=Path(tmp_path))
    finally:
        ray.shutdown()
    assert kill[0].killed is not None
    assert (summary.samples, summary.failed, summary.conflicts, summary.exit_status) == (len(wanted), 0, 0, 0)
    run = open_run(str(tmp_path / "run"))
    assert sorted(run.keys()) == sorted(wanted)
    oracle = Oracle(tiny_model_path)
    for key, ids in wanted.items():
        data = run[key].load(framework="torch")
        assert data["token_ids"].tolist() == ids
        oracle.assert_equal(ids, data["hidden_states"], (0, 4))
    assert verify_run(open_store(str(tmp_path / "run"))).ok
