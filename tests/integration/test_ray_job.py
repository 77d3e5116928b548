"""The main job as users run it: ``ray job submit`` on a real cluster, real replicas, writers, and a real S3 server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from hsx_dist.cli import main
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import load_manifest
from hsx_dist.observe.dashboard import write_dashboards
from hsx_dist.observe.panels import expressions
from hsx_dist.observe.top import look
from hsx_dist.reading import open_run
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.harness.prometheus import prometheus, prometheus_program
from tests.harness.servers import RayHead, ray_head
from tests.integration.oracle import Oracle

ROOT = Path(__file__).resolve().parents[2]
needs_prometheus = pytest.mark.skipif(
    prometheus_program() is None, reason="prometheus is missing: apt-get install prometheus"
)


@dataclass(frozen=True)
class Cluster:
    head: RayHead
    env: dict[str, str]


@pytest.fixture(scope="module")
def cluster(s3):
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **s3.env}
    # With Ray's default of ten seconds, this job's actors would end before their numbers were scraped twice.
    env["RAY_metrics_report_interval_ms"] = "500"
    with ray_head(num_cpus=2, env=env) as head:
        yield Cluster(head, {**os.environ, **env, **head.env})


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(11)
    lengths = rng.integers(1, 250, 40)
    return {f"row/{i}": rng.integers(0, 300, n).tolist() for i, n in enumerate(lengths)}


@pytest.fixture(scope="module")
def config(rows, tiny_model_path, tmp_path_factory, s3) -> Path:
    folder = tmp_path_factory.mktemp("job")
    lines = [json.dumps({"id": key, "token_ids": ids}) for key, ids in rows.items()]
    bad = ["{broken", json.dumps({"id": "empty", "text": ""}), json.dumps({"id": "long", "token_ids": [1] * 256})]
    (folder / "rows.jsonl").write_text("\n".join([*lines[:20], *bad, *lines[20:]]) + "\n")
    settings = {
        "model": str(tiny_model_path),
        "layers": [0, 2, "last"],
        "output": f"{s3.url}/job",
        "store": {"storage_options": {"client_kwargs": {"endpoint_url": s3.endpoint_url}}},
        "input": {"path": str(folder / "rows.jsonl")},
        "engine_kwargs": {
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "max_num_batched_tokens": 64,
            "block_size": 32,
        },
        "codec": "split",
        "page_bytes": "64KiB",
        "segment_bytes": "128KiB",
        "in_flight_bytes": "256KiB",
        "part_bytes": "1MiB",
        "min_replicas": 2,
        "max_replicas": 2,
        "writers": {"num_cpus": 0, "credit_bytes": "512KiB"},
        "task_rows": 4,
        "check_samples": 3,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def submit(config: Path, cluster, *overrides: str) -> subprocess.CompletedProcess[str]:
    about = json.dumps({"run": yaml.safe_load(config.read_text())["output"]})
    job = ["python", "ray_jobs/extract.py", "--config", str(config), *overrides]
    return subprocess.run(
        ["ray", "job", "submit", "--working-dir", ".", "--metadata-json", about, "--", *job],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


@pytest.fixture(scope="module")
def scraper(cluster, tmp_path_factory):
    """A Prometheus that scrapes the whole job. None if it is not installed (its tests are then skipped)."""
    if prometheus_program() is None:
        yield None
        return
    folder = tmp_path_factory.mktemp("prometheus")
    rules = write_dashboards(folder)[1]
    with prometheus(folder, cluster.head.temp_dir / "prom_metrics_service_discovery.json", rules) as server:
        yield server


@dataclass(frozen=True)
class Job:
    output: str
    began: float
    ended: float


@pytest.fixture(scope="module")
def finished(config, cluster, scraper):
    began = time.time()
    done = submit(config, cluster)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return Job(done.stdout, began, time.time())


@pytest.fixture(scope="module")
def job(finished):
    return finished.output


def test_the_summary_counts_every_row(job):
    assert "40 stored, 3 refused, 0 failed" in job
    assert "3 samples against transformers" in job
    assert "MISMATCH" not in job


def test_no_credential_is_in_the_log_or_the_run(job, s3):
    store = open_store(f"{s3.url}/job", s3.storage_options)
    for info in store.list():
        if "/data/" not in info.name:
            assert s3.secret_key.encode() not in store.get(info.name), info.name
    assert s3.secret_key not in job


def test_the_states_in_s3_equal_those_of_transformers(job, rows, s3, tiny_model_path):
    assert "stored" in job
    run = open_run(f"{s3.url}/job", storage_options=s3.storage_options)
    assert set(run.keys()) == set(rows)
    assert {fate.key for fate in run.refused.values()} >= {"empty", "long"}
    assert len({name.split("-")[2] for name in run.manifest.parts}) == 1  # one writer per node
    oracle = Oracle(tiny_model_path)
    for key, ids in rows.items():
        data = run[key].load(framework="torch")
        assert data["token_ids"].tolist() == ids
        oracle.assert_equal(ids, data["hidden_states"], (0, 2, 4))
    assert verify_run(open_store(f"{s3.url}/job", s3.storage_options)).ok


@needs_prometheus
def test_prometheus_finds_data_for_every_panel_and_every_alarm(finished, scraper):
    empty = []
    for what, expression in expressions():
        expression = expression.replace('run=~"$run"', 'run=~".*"').replace("$__rate_interval", "30s")
        if not scraper.query_range(expression, finished.began, finished.ended + 30):
            empty.append(f"{what}: {expression}")
    assert not empty, "\n".join(empty)
    loaded = scraper.rules()
    assert loaded
    assert not [rule for rule in loaded if rule["health"] == "err"], loaded


@needs_prometheus
def test_scraped_metrics_equal_the_totals_of_the_run(finished, scraper, rows, s3):
    run = open_run(f"{s3.url}/job", storage_options=s3.storage_options)

    def scraped(name: str, match: str = "") -> float:
        series = scraper.query_range(
            f'sum(max_over_time(ray_hsx_{name}_total{{run="{s3.url}/job"{match}}}[5m]))',
            finished.ended,
            finished.ended + 1,
        )
        return float(series[0]["values"][-1][1])

    assert scraped("rows", ',fate="stored"') == len(rows)
    assert scraped("rows", ',fate="refused"') == 3
    assert scraped("tokens") == sum(len(ids) for ids in rows.values())
    parts = run.manifest.parts.values()
    assert scraped("parts") == len(parts)
    assert scraped("raw_bytes") == sum(p.raw_bytes for p in parts)
    assert scraped("stored_bytes") == sum(p.size for p in parts)
    assert scraped("puts") == scraped("put_seconds_bucket", ',le="+Inf"') == len(parts)


def test_the_last_heartbeat_carries_the_same_sums(job, s3, rows):
    store = open_store(f"{s3.url}/job", s3.storage_options)
    standing = look(store)
    assert (standing.state, standing.done, standing.stale) == ("complete", len(rows) + 3, False)
    counted = standing.progress["counted"]
    parts = load_manifest(open_place(store).store).parts.values()
    assert counted["parts"] == len(parts)
    assert counted["raw_bytes"] == sum(p.raw_bytes for p in parts)
    assert counted["engine_seconds"] > counted["copy_seconds"] > 0
    assert counted["encode_seconds"] > 0


def test_the_ray_dashboard_names_actors_and_tasks(finished, cluster, s3):
    def api(url: str):
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {cluster.head.token}"})
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)

    def listed(what: str) -> list[dict]:
        with api(f"{cluster.head.dashboard_url}/api/v0/{what}?limit=1000&detail=true") as answer:
            return json.load(answer)["data"]["result"]["result"]

    actors = {a["name"] for a in listed("actors")}
    # Actors are in a namespace of their run.
    assert all(a["ray_namespace"] == a["name"].partition("/")[0] for a in listed("actors") if a["name"][:4] == "hsx-")
    assert {re.sub("^hsx-[0-9a-f]{6}", "hsx", n) for n in actors} >= {
        "hsx/replica/0",
        "hsx/replica/1",
        "hsx/writer/n0w0",
    }
    named = {a["name"].partition("/")[2]: a["repr_name"] for a in listed("actors")}
    assert named["writer/n0w0"] == "hsx writer n0w0"
    # The first replica may finish all rows before the second has started.
    assert {named["replica/0"], named["replica/1"]} & {"hsx replica 0", "hsx replica 1"}
    calls = {t["name"] for t in listed("tasks")}
    assert any(re.fullmatch(r"replica [01]: task \d+, \d+ rows from \d+", name) for name in calls), calls
    # No call of a successful job is shown as failed, except of a replica that had not started when all was done.
    failed = {t["name"] for t in listed("tasks") if t["state"] == "FAILED"}
    assert not any("writer" in name for name in failed), failed
    with api(f"{cluster.head.dashboard_url}/api/jobs/") as answer:
        jobs = json.load(answer)
    assert {j["metadata"]["run"] for j in jobs if j["type"] == "SUBMISSION"} == {f"{s3.url}/job"}


def test_a_second_submission_finds_every_row_done(job, config, cluster):
    assert "attempt 1" in job
    again = submit(config, cluster)
    assert again.returncode == 0, again.stdout[-4000:]
    assert "nothing to do" in again.stdout
    assert "starting engines" not in again.stdout


def test_a_relative_output_in_a_submitted_job_is_refused(config, cluster):
    refused = submit(config, cluster, "output=runs/lost")
    assert refused.returncode != 0
    assert "absolute path or a URL" in refused.stdout
    assert "Traceback" not in refused.stdout


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("output=s3://no-such-bucket/x", "no-such-bucket"),
        ("store.storage_options.client_kwargs.endpoint_url=http://127.0.0.1:9", "127.0.0.1:9"),
        ("layers=[7]", "layers"),
    ],
)
def test_wrong_job_settings_are_refused_before_an_engine_starts(config, s3, monkeypatch, capsys, override, said):
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--config", str(config), "pool=threads", override])
    shown = capsys.readouterr()
    assert ended.value.code == 2, shown
    assert said in shown.err
    assert "starting engines" not in shown.out
    assert "Traceback" not in shown.err
