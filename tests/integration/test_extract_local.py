"""``hsx_dist.extract``: real vLLM in this process, writer threads, a folder. The reference is transformers."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import hsx_dist
from hsx_dist.errors import ConfigError, EngineError, RunMismatch
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.integration.oracle import Oracle

ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "max_num_batched_tokens": 64,
    "block_size": 32,
}
# Small enough that samples have several pages and segments, and some requests are longer than the ring (512-byte rows
# of 5 layers).
SIZES = {"page_bytes": "40KiB", "segment_bytes": "100KiB", "part_bytes": "200KiB", "in_flight_bytes": "200KiB"}


def settings(**changes):
    return {"engine_kwargs": ENGINE, "layers": "all", **SIZES, **changes}


def prompts() -> list:
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, 300, n).tolist() for n in (1, 2, 15, 16, 17, 63, 64, 65, 100, 200, 255)]
    shared = rng.integers(0, 300, 48).tolist()  # the same prefix, for prefix caching
    return [
        *ids,
        *[shared + rng.integers(0, 300, n).tolist() for n in (1, 16, 40)],
        "Plain text goes through the tokenizer.",
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}],
        {"id": "named", "text": "A row with an id of its own."},
        "",  # refused: empty
        {"id": "long", "token_ids": [1] * 256},  # refused: no room for an answer
        {"id": "named", "text": "The id is taken."},  # refused
    ]


@pytest.fixture(scope="module")
def run(tiny_model_path, tmp_path_factory):
    output = tmp_path_factory.mktemp("local") / "run"
    return hsx_dist.extract(prompts(), model=str(tiny_model_path), output=output, **settings())


def test_every_row_is_stored_or_refused_for_a_reason(run):
    assert len(run) == 17
    assert "named" in set(run.keys())
    reasons = {key: fate.reason for key, fate in run.refused.items()}
    assert len(reasons) == 3
    assert "256" in reasons["long"]
    assert any("again. Give the row a different id" in r for r in reasons.values())
    assert run.complete


def test_states_equal_those_of_transformers(run, tiny_model_path):
    oracle = Oracle(tiny_model_path)
    lengths = set()
    for sample in run:
        data = sample.load(framework="torch")
        oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], sample.layer_ids)
        lengths.add(sample.num_tokens)
    assert {1, 16, 17, 64, 65, 255} <= lengths


def test_long_samples_are_stored_in_several_segments(run):
    assert any(len(record.segments) > 1 for record in run.manifest.samples.values())
    assert len(run.manifest.parts) > 1


def test_verify_passes_and_names_the_part_of_a_flipped_bit(run, tmp_path):
    root = Path(run.url)
    assert verify_run(open_store(str(root))).ok
    part = sorted(root.glob("run-*/data/*.safetensors"))[1]
    healthy = part.read_bytes()
    broken = bytearray(healthy)
    broken[len(broken) // 2] ^= 4
    part.write_bytes(broken)
    try:
        report = verify_run(open_store(str(root)))
        assert not report.ok
        assert {p.part for p in report.problems} == {f"data/{part.name}"}
        hsx = subprocess.run(
            [sys.executable, "-m", "hsx_dist.cli", "verify", str(root)], capture_output=True, text=True, check=False
        )
        assert hsx.returncode == 1
        assert part.name in hsx.stdout + hsx.stderr
        job = verify_job(root, tmp_path)
        assert job.returncode == 1
        assert part.name in job.stdout
    finally:
        part.write_bytes(healthy)


def verify_job(run: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``ray_jobs/verify.py`` on the run of a configuration."""
    (folder / "c.yaml").write_text(f"model: any\noutput: {run}\n")
    command = [sys.executable, "ray_jobs/verify.py", "--config", str(folder / "c.yaml")]
    cwd = Path(__file__).resolve().parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_verify_as_a_job_reads_the_run_of_a_configuration(run, tmp_path):
    done = verify_job(Path(run.url), tmp_path)
    assert (done.returncode, done.stdout[:3]) == (0, "ok:"), done.stdout + done.stderr


def test_the_same_call_again_starts_no_engine(run, tiny_model_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.jobs.extract.make_fleet", lambda *_, **__: pytest.fail("an engine was started"))
    again = hsx_dist.extract(prompts(), model=str(tiny_model_path), output=run.url, **settings())
    assert set(again.keys()) == set(run.keys())


def test_another_meaning_is_refused_and_named(run, tiny_model_path):
    with pytest.raises(RunMismatch, match="layers"):
        hsx_dist.extract(prompts(), model=str(tiny_model_path), output=run.url, **settings(layers=[1]))


def test_another_text_of_any_stored_row_is_refused(run, tiny_model_path):
    assert all(map(run.manifest.content_of, run.keys()))
    changed = prompts()
    changed[16] = {**changed[16], "text": "Another text."}
    with pytest.raises(RunMismatch, match=r"got other content in row 16 \('named'\)"):
        hsx_dist.extract(changed, model=str(tiny_model_path), output=run.url, **settings())


def test_a_longer_input_continues_the_run_with_generated_answers(tiny_model_path, tmp_path):
    """A second attempt computes only the missing rows. Generated tokens have states, except the last one. Rows that
    cannot be hashed, shipped or templated are refused by both attempts.
    """
    output = tmp_path / "run"
    deep = functools.reduce(lambda value, _: {"a": [value]}, range(300), None)  # 600 levels
    chat = [{"role": "user", "content": "x"}]
    bad = [
        {"id": "metadata", "token_ids": [5, 6], "source": deep},
        {"id": "tools", "messages": chat, "tools": [deep]},
        {"id": "messages", "messages": [{**chat[0], "tool_calls": [deep]}]},
        {"id": "text", "messages": json.dumps([{**chat[0], "tool_calls": [deep]}])},
        {"id": "number", "token_ids": [5, 10**5000]},
    ]
    first = [{"id": f"a{i}", "token_ids": list(range(5, 25 + i))} for i in range(4)]
    more = [*first, {"id": "b", "token_ids": list(range(9, 40)), "source": {"n": 1 << 70}}]
    sampling = {"max_tokens": 7, "ignore_eos": True, "temperature": 0.0}
    options = settings(include_output_tokens=True, sampling_params=sampling, layers=[2, "last"], codec="zstd")
    options["input"] = {"metadata": ["source"]}
    before = hsx_dist.extract(bad + first, model=str(tiny_model_path), output=output, **options)
    parts = set(before.manifest.parts)
    assert set(before.refused) == {row["id"] for row in bad}
    run = hsx_dist.extract(bad + more, model=str(tiny_model_path), output=output, **options)
    assert set(run.refused) == {row["id"] for row in bad}
    assert "nested at most 64 deep" in run.refused["metadata"].reason
    assert run["b"].metadata == {"source": {"n": str(1 << 70)}}
    assert {r.attempt for r in run.manifest.samples.values()} == {1, 2}
    assert parts < set(run.manifest.parts)
    oracle = Oracle(tiny_model_path)
    for row in more:
        data = run[row["id"]].load(framework="torch")
        ids = data["token_ids"].tolist()
        assert ids[: len(row["token_ids"])] == row["token_ids"]
        assert len(ids) == len(row["token_ids"]) + 7 - 1
        oracle.assert_equal(ids, data["hidden_states"], (2, 4))


def test_wrong_settings_are_refused_before_an_engine_starts(tiny_model_path, tmp_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.jobs.extract.make_fleet", lambda *_, **__: pytest.fail("an engine was started"))
    model = str(tiny_model_path)
    for changes, said in (
        ({"layers": [9]}, "0"),
        ({"layers": [1, 1]}, "1"),
        ({"codec": "spilt"}, "split"),
        ({"in_flight_bytes": "150KiB"}, "segment_bytes"),
        ({"page_bytes": "1KiB", "segment_bytes": "10KiB"}, "segment_bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            hsx_dist.extract(["x"], model=model, output=tmp_path / "run", **settings(**changes))
    with pytest.raises(ConfigError, match="model"):
        hsx_dist.extract(["x"], model=str(tmp_path / "nothing"), output=tmp_path / "run", **settings())
    assert not (tmp_path / "run" / "run.json").exists()


def test_codec_none_with_one_sample_an_object_is_vllms_own_file(tiny_model_path, tmp_path):
    from safetensors import safe_open

    rows = [{"id": "x/y", "token_ids": list(range(3, 60))}]
    run = hsx_dist.extract(rows, model=str(tiny_model_path), output=tmp_path, **settings(codec="none", layout="sample"))
    (part,) = tmp_path.glob("run-*/data/part-*=x%2Fy.safetensors")
    with safe_open(part, "pt") as f:
        assert set(f.keys()) == {"hidden_states", "token_ids"}
        states, ids = f.get_tensor("hidden_states"), f.get_tensor("token_ids")
    assert ids.tolist() == rows[0]["token_ids"]
    Oracle(tiny_model_path).assert_equal(ids.tolist(), states, run["x/y"].layer_ids)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["meaning"]["layers"] == [0, 1, 2, 3, 4]


def test_a_row_that_the_engine_refuses_fails_alone_and_runs_after_correction(tiny_model_path, tmp_path):
    """vLLM derives a shorter limit from this folder than the preflight check does."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_seq_len": 128}))
    engine = {k: v for k, v in ENGINE.items() if k != "max_model_len"}
    rows = [{"id": f"r{i}", "token_ids": [5] * n} for i, n in enumerate((5, 200, 7))]

    def run(rows):
        return hsx_dist.extract(rows, model=str(model), output=tmp_path / "run", layers=[1], engine_kwargs=engine)

    first = run(rows)
    assert sorted(first.keys()) == ["r0", "r2"]
    assert "at most 127 tokens, got 200" in first.refused["r1"].reason
    second = run([*rows[:1], {"id": "r1", "token_ids": [5] * 100}, *rows[2:]])
    assert sorted(second.keys()) == ["r0", "r1", "r2"]
    assert not second.refused


def test_sampling_parameters_that_the_engine_refuses_raise_and_refuse_no_row(tiny_model_path, tmp_path):
    """vLLM checks some of them at each request only. A refused row would stay refused with other parameters."""
    run = partial(
        hsx_dist.extract, ["a"], model=str(tiny_model_path), output=tmp_path / "run", engine_kwargs=ENGINE, layers=[1]
    )
    with pytest.raises(EngineError, match=r"sampling_params: expected those that this engine accepts, .* logprobs"):
        run(sampling_params={"logprobs": 50})
    assert len(run().keys()) == 1


def test_wrong_sampling_parameters_raise_before_the_engine_is_loaded(tiny_model_path, tmp_path):
    with pytest.raises(EngineError, match=r"sampling_params: expected arguments of vLLM's SamplingParams.*temperature"):
        hsx_dist.extract(
            ["a"], model=str(tiny_model_path), output=tmp_path / "run", sampling_params={"temperature": -1}
        )
