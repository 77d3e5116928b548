"""Resume a submitted job that loses a replica, a writer, then its driver and its cluster. The same command on another
cluster ends with exactly the model's samples. Real Ray jobs, real vLLM, a real S3 server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from hsx_dist.format.place import find_place, open_place
from hsx_dist.format.runs import load_manifest, read_heartbeat
from hsx_dist.reading import open_run
from hsx_dist.reading.status import run_status
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.harness.hooked_model import HookedModel, worst_row
from tests.harness.servers import RayHead, ray_head
from tests.harness.unruly_model import SLOW, unruly_llama, write_unruly_plugin
from tests.integration.oracle import Oracle

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
POISON = 319  # a token that no good row has
LAYERS = (0, 2, 4)
ROWS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """At most three steps per second."""
    return unruly_llama(tmp_path_factory.mktemp("model") / "m", step_seconds=0.3, poison_token=POISON, kv_heads=2)


@pytest.fixture(scope="module")
def good():
    rng = np.random.default_rng(5)
    return {f"r{i:03d}": rng.integers(0, 300, n).tolist() for i, n in enumerate(rng.integers(20, 200, ROWS))}


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def settings(good, model, tmp_path_factory, s3) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    lines = [json.dumps({"id": key, "token_ids": ids}) for key, ids in good.items()]
    bad = ["{broken", json.dumps({"id": "empty", "text": ""}), json.dumps({"id": "long", "token_ids": [1] * 256})]
    poison = json.dumps({"id": "poison", "token_ids": [5, POISON, 6]})
    return {
        "model": str(model),
        "layers": list(LAYERS),
        "store": {"storage_options": {"client_kwargs": {"endpoint_url": s3.endpoint_url}}},
        "input": {"path": write(folder / "rows.jsonl", [*lines[:20], *bad, *lines[20:90], poison, *lines[90:]])},
        "engine_kwargs": {
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "max_num_batched_tokens": 64,
            "block_size": 32,
        },
        "page_bytes": "64KiB",
        "segment_bytes": "128KiB",
        "in_flight_bytes": "256KiB",
        "part_bytes": "256KiB",
        "part_seconds": 2,
        "writers": {"num_cpus": 0, "credit_bytes": "512KiB"},
        "task_rows": 4,
        "max_tries": 2,  # the row that kills its engine fails after two deaths
    }


def cluster(s3, plugin: Path, slow: Path):
    """``slow``: while this file exists, each step takes longer. So the run does not end before it is interrupted."""
    env = {"PATH": PATH, "PYTHONPATH": str(plugin), "RAY_JOB_STOP_WAIT_TIME_S": "60", SLOW: str(slow)}
    return ray_head(num_cpus=2, env={**s3.env, **env})


def submit(head: RayHead, s3, config: Path, *overrides: str, wait: bool, name: str = ""):
    job = ["python", "ray_jobs/extract.py", "--config", str(config), *overrides]
    options = [*([] if wait else ["--no-wait"]), *(["--submission-id", name] if name else [])]
    return subprocess.run(
        ["ray", "job", "submit", *options, "--working-dir", ".", "--", *job],
        cwd=ROOT,
        env={**os.environ, **s3.env, **head.env, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def stop(head: RayHead, name: str) -> None:
    """The same request as ``ray job stop``, without waiting."""
    url = f"{head.dashboard_url}/api/jobs/{name}/stop"
    request = urllib.request.Request(url, method="POST", headers={"Authorization": f"Bearer {head.token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"stopped": True}


def until(true: Callable[[], Any], seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"expected {true} within {seconds} s"
        time.sleep(0.1)
    return found


def processes(head: RayHead, words: str) -> list[psutil.Process]:
    """Processes of this cluster only: descendants of its head whose command line begins with these words."""
    found = []
    for process in psutil.Process(head.process.process.pid).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(words) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_one(head: RayHead, words: str) -> None:
    until(lambda: processes(head, words))[0].send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_dies_and_is_resumed_elsewhere_has_every_row_once(settings, good, model, s3, tmp_path):
    plugin = write_unruly_plugin(tmp_path / "plugin")
    url, options = f"{s3.url}/resumed", s3.storage_options
    store = open_store(url, options)
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({**settings, "output": url, "min_replicas": 2, "max_replicas": 2}))

    def proven() -> int:
        return len(load_manifest(open_place(store).store).samples)

    slow = tmp_path / "slow"
    slow.touch()
    with cluster(s3, plugin, slow) as head:
        begun = submit(head, s3, config, wait=False)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        until(lambda: (place := find_place(store)) and read_heartbeat(place.store, 1))
        until(proven)
        kill_one(head, "ray::ReplicaActor")
        at = proven()
        until(lambda: proven() > at)
        kill_one(head, "ray::WriterActor")
        at = proven()
        until(lambda: proven() > at + 5)
        kill_one(head, "python ray_jobs/extract.py")  # not the shell that started it
        until(lambda: not processes(head, "ray::ReplicaActor") and not processes(head, "ray::WriterActor"))

    own = open_place(store).store
    before = load_manifest(own)
    kept = {key: (s.attempt, s.segments) for key, s in before.samples.items()}
    assert 7 < len(kept) < len(good)
    status = run_status(store, observe_seconds=7)
    assert status.state == "silent", status
    assert status.rows["stored"] == len(kept)
    assert status.rows["total"] == ROWS + 4

    with cluster(s3, plugin, slow) as head:
        killed = dict(kept)
        fewer = ("min_replicas=1", "max_replicas=1", "resume=must")
        begun = submit(head, s3, config, *fewer, wait=False, name="stopped")
        assert begun.returncode == 0, begun.stdout + begun.stderr
        until(lambda: proven() > len(kept))
        stop(head, "stopped")
        until(lambda: (read_heartbeat(own, 2) or {})["state"] != "running")
        assert (read_heartbeat(own, 2) or {})["state"] == "stopped: signal"
        kept |= {key: (s.attempt, s.segments) for key, s in load_manifest(own).samples.items()}
        assert len(kept) < len(good)
        slow.unlink()
        resumed = submit(head, s3, config, *fewer, wait=True)
    # A row that killed its engine is a failure, and the job reports it. All other rows are stored.
    assert f"{ROWS} stored, 3 refused, 1 failed" in resumed.stdout, resumed.stdout[-4000:] + resumed.stderr[-1000:]
    assert "attempt 3" in resumed.stdout
    assert resumed.returncode == 1

    after = load_manifest(own)
    assert {key: (after.samples[key].attempt, after.samples[key].segments) for key in kept} == kept
    for attempt, before_it in ((2, killed), (3, kept)):
        again = {key for r in after.receipts if r.attempt == attempt for key in r.table.keys()}  # noqa: SIM118
        assert not again & before_it.keys()
    assert verify_run(store).ok
    (poison,) = after.failed.values()
    assert (poison.key, poison.fate, poison.tries) == ("poison", "poison", 2)
    status = run_status(store)
    assert status.state == "complete"
    assert status.rows == {"total": ROWS + 4, "stored": ROWS, "refused": 3, "failed": 0, "poison": 1, "open": 0}

    run = open_run(url, storage_options=options)
    assert sorted(run.keys()) == sorted(good)
    oracle = Oracle(model)
    for key, ids in good.items():
        sample = run[key].load(framework="torch")
        assert sample["token_ids"].tolist() == ids
        oracle.assert_equal(ids, sample["hidden_states"], LAYERS)


#: Points next to the hidden states: with heads, without, and of every layer.
CAPTURE = {"points": {"hidden_states": [0, -1], "q": [1], "k": [3], "mlp_out": "all"}}
STORED = {"hidden_states": (0, 4), "q": (1,), "k": (3,), "mlp_out": (0, 1, 2, 3)}


@pytest.mark.soak  # the job above is killed and resumed, and test_points_run.py has the points
def test_points_of_a_killed_job_that_is_resumed_are_the_models(settings, good, model, s3, tmp_path):
    rows = dict(list(good.items())[:40])
    lines = [json.dumps({"id": key, "token_ids": ids}) for key, ids in rows.items()]
    points = {**{k: v for k, v in settings.items() if k != "layers"}, "source": "taps", "capture": CAPTURE}
    points["input"] = {"path": write(tmp_path / "rows.jsonl", lines)}
    url, options = f"{s3.url}/points", s3.storage_options
    store = open_store(url, options)
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({**points, "output": url, "min_replicas": 2, "max_replicas": 2}))

    def proven() -> int:
        return len(load_manifest(place.store).samples) if (place := find_place(store)) else 0

    slow = tmp_path / "slow"
    slow.touch()
    with cluster(s3, write_unruly_plugin(tmp_path / "plugin"), slow) as head:
        begun = submit(head, s3, config, wait=False)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        until(lambda: proven() > 3)
        kill_one(head, "python ray_jobs/extract.py")
        until(lambda: not processes(head, "ray::ReplicaActor") and not processes(head, "ray::WriterActor"))
        own = open_place(store).store
        kept = {key: (s.attempt, s.segments) for key, s in load_manifest(own).samples.items()}
        assert 3 < len(kept) < len(rows)
        slow.unlink()
        fewer = ("min_replicas=1", "max_replicas=1", "resume=must")
        resumed = submit(head, s3, config, *fewer, wait=True)
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    assert f"{len(rows)} stored" in resumed.stdout

    after = load_manifest(own)
    assert {key: (after.samples[key].attempt, after.samples[key].segments) for key in kept} == kept
    assert verify_run(store).ok
    run = open_run(url, storage_options=options)
    assert run.keys() == list(rows)
    hooked = HookedModel(model)
    for key, ids in rows.items():
        sample = run[key]
        assert {name: p.layers for name, p in sample.points.items()} == STORED
        assert sample.token_ids().tolist() == ids
        right = hooked.rows(ids)
        for name, layers in STORED.items():
            for layer in layers:
                error = worst_row(sample.point(name, layer), right[name, layer])
                assert error < 2e-5, (key, name, layer, error)
