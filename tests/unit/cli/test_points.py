"""Commands on a run of points: their output, written files and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsx_dist.store import open_store
from tests.harness.points import HEAD, PointSample, point_sample
from tests.harness.runs import RunWriter, write_v1_run
from tests.unit.cli.test_inspect import hsx, hsx_json


@pytest.fixture
def made() -> PointSample:
    return point_sample("a", hidden=False)


@pytest.fixture
def run(made: PointSample, tmp_path: Path) -> str:
    path = str(tmp_path / "run")
    store = open_store(path)
    write_v1_run(store, {"meaning": {"model": "tiny"}, "settings": {"codec": "split"}})
    writer = RunWriter(store, attached={"q": np.arange(3), "label": np.ones(2)})
    writer.put(made.segments(0))
    writer.put([*point_sample("both", hidden=True, seed=7).segments(1)])
    writer.complete()
    return path


def test_show_a_sample(run: str, made: PointSample, capsys: pytest.CaptureFixture[str]) -> None:
    facts = hsx_json(capsys, "show", run, "a")
    assert {name: (p["shape"], p["dtype"], p.get("heads"), p["layer_ids"]) for name, p in facts["points"].items()} == {
        "q": ([37, 2, 48], "bfloat16", 6, [3, 7]),
        "mlp_out": ([37, 1, 24], "float32", None, [7]),
        "topk_ids": ([37, 2, 4], "int32", None, [3, 7]),
    }
    rows = made.points["mlp_out"].view(np.float32)[:, 0].astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)
    (shown,) = facts["points"]["mlp_out"]["layers"]
    assert shown["mean_norm"] == pytest.approx(norms[np.isfinite(norms)].mean())
    assert len(facts["points"]["q"]["layers"]) == 2
    assert "shape" not in facts
    assert hsx("show", run, "a") == 0
    text = capsys.readouterr().out
    assert "width in 6 heads" in text
    assert "topk_ids" in text
    assert hsx_json(capsys, "show", run, "both")["shape"] == [37, 2, 24]
    assert hsx("show", run) == 0
    assert "q 3,7" in capsys.readouterr().out


def test_cat_points(run: str, made: PointSample, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.safetensors"
    assert hsx("cat", run, "a", "-o", str(out), "--points", "q,topk_ids", "--layers", "7", "--tokens", "2:9") == 0
    found = load_file(out)
    q = made.points["q"].reshape(37, 2, -1, HEAD)[2:9, 1:]
    assert np.array_equal(found["q"].view(torch.uint16).numpy(), q)
    assert np.array_equal(found["topk_ids"].numpy(), made.points["topk_ids"][2:9, 1:])
    assert found["layer_ids.q"].tolist() == [7]
    assert np.array_equal(found["token_ids"].numpy(), made.token_ids[2:9])
    assert found["attached.q"].tolist() == [0, 1, 2]
    assert found["label"].tolist() == [1, 1]
    assert "heads" in capsys.readouterr().err
    assert hsx("cat", run, "a", "-o", str(tmp_path / "a.npz"), "--points", "mlp_out") == 0
    with np.load(tmp_path / "a.npz") as arrays:
        assert np.array_equal(arrays["mlp_out"].view(np.uint32), made.points["mlp_out"])
        assert arrays["q"].tolist() == [0, 1, 2]
    assert hsx("cat", run, "a", "-o", str(tmp_path / "a.npy"), "--points", "topk_ids") == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), made.points["topk_ids"])
    assert hsx("cat", run, "both", "-o", str(tmp_path / "b.npz")) == 0
    with np.load(tmp_path / "b.npz") as arrays:
        assert arrays["hidden_states"].shape == (37, 2, 24)
        assert arrays["layer_ids"].tolist() == [2, 30]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-o", "x.npz"), "expected one of the points q, mlp_out, topk_ids, got 'hidden_states'"),
        (("-o", "x.npz", "--points", "z"), "got 'z'"),
        (("-o", "x.npz", "--points", "q,file"), "share no name with another array of a file, got ['file']"),
        (("-o", "x.npy", "--points", "q,mlp_out"), "expected .npz or .safetensors for 2 points"),
        (("-o", "x.npz", "--points", "q,mlp_out", "--layers", "3"), "expected layers of point 'mlp_out' among"),
        (("-o", "x.safetensors", "--points", "q,mlp_out", "--layers", "3"), "expected layers of point 'mlp_out' among"),
    ],
)
def test_cat_of_missing_points_fails_and_writes_no_file(
    run: str, args: Any, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hsx("cat", run, "a", *args) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.glob("x.*")) == []


@pytest.mark.parametrize("to", ["vllm", "speculators", "specforge-eagle3", "specforge-dflash", "topk-logprobs"])
def test_an_exporter_refuses_a_run_without_hidden_states(
    run: str, to: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert hsx("export", run, str(tmp_path / "out"), "--to", to) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot be exported for {to}: expected hidden states, got points q, mlp_out, topk_ids" in said
    assert not (tmp_path / "out").exists()


def test_verify_ls_and_report(run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert hsx("verify", run) == 0
    capsys.readouterr()
    listed = hsx_json(capsys, "ls", run)
    assert [(s["key"], s["tokens"]) for s in listed["samples"]] == [("a", 37), ("both", 37)]
    assert listed["totals"]["tokens"] == 74
    assert hsx("report", run, "-o", str(tmp_path / "report.html")) == 0
    page = (tmp_path / "report.html").read_text()
    assert "74" in page
    assert "q 3" in page


def test_a_report_without_hidden_states(made: PointSample, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    write_v1_run(store, {"meaning": {}, "settings": {}})
    RunWriter(store).put(made.segments(0))
    assert hsx("report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")) == 0
    assert "mlp_out 7" in (tmp_path / "report.html").read_text()
