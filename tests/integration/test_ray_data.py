"""A run in Ray Data and through Ray Train's iterator, and an export as Ray tasks, on a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.points import point_sample
from tests.harness.runs import store_run
from tests.harness.servers import RayHead
from tests.unit.reading.test_points import run_of

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import numpy as np, ray
from hsx_dist.errors import ConfigError
from hsx_dist import open_run
from hsx_dist.ray import HiddenStatesSource, export, read_hidden_states
from hsx_dist.testing.samples import random_sample

ray.init(address=sys.argv[1], log_to_driver=False)
url, out, points_url = sys.argv[2:]
samples = {f"s{i:02d}": random_sample(f"s{i:02d}", 5 + i % 7, seed=i, odd=False) for i in range(30)}
data = read_hidden_states(url, layers=[30, 2], override_num_blocks=4)
rows = data.take_all()
assert sorted(r["key"] for r in rows) == sorted(samples), len(rows)
for row in rows:
    wide = samples[row["key"]].states[:, [2, 0]].astype(np.uint32) << 16
    assert row["hidden_states"].dtype == np.float32
    assert np.array_equal(row["hidden_states"], wide.view(np.float32)), row["key"]
    assert np.array_equal(row["input_ids"], samples[row["key"]].token_ids)
[shard] = data.random_shuffle(seed=1).streaming_split(1)
seen = [key for batch in shard.iter_batches(batch_size=8) for key in batch["key"]]
assert sorted(seen) == sorted(samples) and seen != sorted(samples)
try:
    read_hidden_states(url, shuffle=True)
except ConfigError as e:
    assert "shuffle" in str(e)
else:
    raise AssertionError("expected a refusal")
run = open_run(points_url)
some = read_hidden_states(run, points=["q", "topk_ids"], layers=[7], override_num_blocks=2)
rows = some.take_all()
assert sorted(r["key"] for r in rows) == ["a", "b"]
for row in rows:
    right = run[row["key"]].load([7], points=["q", "topk_ids"], framework="numpy")["points"]
    for name in right:
        assert row[name].dtype == right[name].dtype, name
        np.testing.assert_array_equal(row[name], right[name])  # random bits: NaNs too
    assert "hidden_states" not in row and row["q"].shape[1:] == (1, 6, 8), row["q"].shape
q, ids = 48 * 2, 4 * 4
total = sum(run[key].num_tokens for key in run.keys()) * (q + ids) * 2
source = HiddenStatesSource(run.select(), {"points": ["q", "topk_ids"], "layers": [7]})
assert abs(source.estimate_inmemory_data_size() - total) <= 1
for wrong in ({"points": ["z"]}, {"points": ["q"], "layers": [4]}, {"points": "q"}):
    try:
        read_hidden_states(run, **wrong)
    except ConfigError as e:
        assert "points" in str(e) or "layers" in str(e), e
    else:
        raise AssertionError("expected a refusal")
report = export(url, "vllm", out, shards=2)
assert (report.written, report.finished) == (30, True), report
print("FINE")
"""


def test_a_run_is_read_and_exported_by_rays_tasks(ray_cluster: RayHead, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    store_run(open_store(url), [random_sample(f"s{i:02d}", 5 + i % 7, seed=i, odd=False) for i in range(30)])
    program = tmp_path / "read.py"
    program.write_text(PROGRAM)
    points = str(tmp_path / "points")
    run_of(point_sample("a").segments(0), point_sample("b", 5, seed=9).segments(0), store=open_store(points))
    argv = [sys.executable, str(program), ray_cluster.address, url, str(tmp_path / "out"), points]
    done = subprocess.run(argv, env={**os.environ, **ray_cluster.env}, capture_output=True, text=True, timeout=560)
    assert done.stdout.strip().endswith("FINE"), done.stderr[-4000:]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 30
    # The job's entry point joins the cluster without an address, and finds all files written.
    again = [sys.executable, "ray_jobs/export.py", url, str(tmp_path / "out"), "--to"]
    env = {**os.environ, **ray_cluster.env}
    done = subprocess.run([*again, "vllm"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=560)
    assert "0 files written, 30 existed before; complete" in done.stdout, done.stdout + done.stderr[-4000:]
    done = subprocess.run([*again, "nobody"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=560)
    assert (done.returncode, "expected one of" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "address",
    # tests/unit/jobs/test_connect.py has the last two, which start the same local cluster as None.
    ["the cluster", None, pytest.param("", marks=pytest.mark.soak), pytest.param("local", marks=pytest.mark.soak)],
)
def test_no_process_of_a_command_imports_modules_of_its_working_folder(
    ray_cluster: RayHead, tmp_path: Path, address: str | None
) -> None:
    """The folder may be a run of another author. By default Ray's workers search the driver's folder first."""
    run, trap = tmp_path / "run", tmp_path / "executed"
    store_run(open_store(str(run)), [random_sample("a", 5, odd=False)])
    for name in ("safetensors.py", "numpy.py", "multiprocessing.py", "hsx_dist/__init__.py"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(f"open({str(trap)!r}, 'w').write(__file__)\nraise ImportError('a module of the run')\n")
    hsx = Path(sys.executable).with_name("hsx")
    argv = [str(hsx), "export", ".", str(tmp_path / "out"), "--to", "vllm", "--ray"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    if address == "the cluster":
        env |= {**ray_cluster.env, "RAY_ADDRESS": ray_cluster.address}
    else:
        env |= {"RAY_TMPDIR": "/tmp"} | ({} if address is None else {"RAY_ADDRESS": address})
    done = subprocess.run(argv, cwd=run, env=env, capture_output=True, text=True, timeout=560)
    assert not trap.exists(), trap.read_text()
    assert "1 files written; complete" in done.stdout, done.stdout + done.stderr[-4000:]
