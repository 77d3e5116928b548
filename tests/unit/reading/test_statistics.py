"""``hsx stats``: exact in float64, streaming, stored with the run and removed with it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.cli.app import app
from hsx_dist.cli.stats import run_stats
from hsx_dist.errors import ConfigError, FormatError, RunError
from hsx_dist.exporting.base import ExportOptions, num_layers_of
from hsx_dist.format.names import statistics_name
from hsx_dist.observe.report.document import _what_ran
from hsx_dist.observe.report.facts import gather_facts
from hsx_dist.reading import statistics
from hsx_dist.reading.garbage import remove_run
from hsx_dist.reading.hooks import stream_place
from hsx_dist.reading.run import Run, open_run
from hsx_dist.reading.statistics import RunStatistics, _Moments, compute_statistics, read_statistics, store_statistics
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run, unsealed
from tests.harness.traced_memory import trace_memory

SAMPLES = [random_sample(f"s{i:02d}", 5 + 7 * i, seed=i, odd=False) for i in range(12)]
TOKENS = sum(len(s.token_ids) for s in SAMPLES)


def run_at(path: Path, version: int = 2) -> Run:
    return Run(store_run(open_store(str(path)), SAMPLES, per_part=4, version=version).place.root)


def tokens_of(run: Run, layer: int, skip: int = 0) -> np.ndarray[Any, Any]:
    data = HiddenStatesDataset(run, layers=[layer], framework="numpy", tokens=slice(skip, None))
    return np.concatenate([item["hidden_states"][:, 0] for item in data]).astype(np.float64)


@pytest.mark.parametrize("skip", [0, 2])
def test_statistics_equal_numpys_over_all_tokens(tmp_path: Path, skip: int) -> None:
    run = run_at(tmp_path)
    store_statistics(run, compute_statistics(run, [30, 2], skip_first=skip))
    found = read_statistics(Run(open_store(str(tmp_path))))
    assert list(found.layers) == [2, 30]
    for layer, own in found.layers.items():
        x = tokens_of(run, layer, skip)
        norms = np.linalg.norm(x, axis=1)
        assert (own.tokens, own.samples, own.non_finite, own.skip_first) == (TOKENS - 12 * skip, 12, 0, skip)
        np.testing.assert_allclose(own.mean, x.mean(0), rtol=1e-12, atol=1e-12 * np.abs(x).max())
        np.testing.assert_allclose(own.variance, x.var(0), rtol=1e-12)
        assert np.array_equal(own.absmax, np.abs(x).max(0))
        expected = (norms.mean(), np.sqrt((norms**2).mean()), norms.max())
        np.testing.assert_allclose((own.mean_norm, own.rms_norm, own.max_norm), expected, rtol=1e-12)
        assert own.norm_factor == pytest.approx(np.sqrt(x.shape[1]) / norms.mean())


def test_a_small_variance_on_a_large_mean_is_exact() -> None:
    """The sum of squares minus the squared sum would have no correct digit here."""
    x = 1e8 + np.random.default_rng(0).standard_normal((5000, 3))
    moments = _Moments(3)
    for part in np.array_split(x, 7):
        moments.add(part)
    np.testing.assert_allclose(moments.done(0, 1, 0).variance, x.var(0), rtol=1e-6)


def test_tokens_that_are_not_finite_are_counted_and_left_out() -> None:
    x = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    x[[5, 2000], [0, 3]] = np.nan, np.inf
    moments = _Moments(4)
    moments.add(x)
    own = moments.done(0, 1, 0)
    assert (own.tokens, own.non_finite) == (2998, 2)
    np.testing.assert_allclose(own.mean, np.delete(x, [5, 2000], 0).mean(0, dtype=np.float64))


def test_a_bounded_sample_reads_no_more(tmp_path: Path) -> None:
    own = compute_statistics(run_at(tmp_path), [15], max_tokens=100).layers[15]
    assert own.tokens == 100
    assert own.samples < 12
    with pytest.raises(ConfigError, match="expected max_tokens of at least 1"):
        compute_statistics(run_at(tmp_path / "other"), [15], max_tokens=0)


@pytest.mark.parametrize("version", [1, 2])
def test_statistics_are_stored_in_the_run_and_removed_with_it(tmp_path: Path, version: int) -> None:
    run = run_at(tmp_path, version)
    store_statistics(run, compute_statistics(run, [15]))
    name = statistics_name(15)
    assert [info.name for info in run.store.list("statistics/")] == [name]
    body = unsealed(run.store.get(name))
    run.store.put(name, [json.dumps({**body, "mean": body["mean"][:-12]}).encode()])
    with pytest.raises(FormatError, match="Run `hsx stats` again"):
        read_statistics(run)
    run.store.put(name, [json.dumps({**body, "run": "another"}).encode()])
    assert read_statistics(run).layers == {}
    remove_run(run.place.root, run.place)
    assert not [info.name for info in run.place.root.list("") if "statistics/" in info.name]
    with pytest.raises(RunError):
        store_statistics(run, compute_statistics(Run(run_at(tmp_path / "other").place.root), [15]))


def test_the_command_prints_and_stores(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    run_at(tmp_path)
    done = CliRunner().invoke(app, ["stats", str(tmp_path), "--layers", "2,15", "--skip-first", "1", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["layers"]
    assert [(row["layer"], row["tokens"]) for row in rows] == [(2, TOKENS - 12), (15, TOKENS - 12)]
    assert set(read_statistics(Run(open_store(str(tmp_path)))).layers) == {2, 15}


@pytest.mark.parametrize(
    ("layers", "told", "expected"),
    [
        ("last", 30, [30]),
        ("2,-1", 30, [2, 30]),
        ("all", 30, [2, 15, 30]),
        ("ALL", 30, [2, 15, 30]),
        (" [all] ", 10**400, [2, 15, 30]),
    ],
    ids=range(5),
)
def test_the_command_names_layers_as_extraction_does(
    tmp_path: Path, layers: str, told: int, expected: list[int]
) -> None:
    """A part may claim any number of layers. ``all`` are those that are stored."""
    from typer.testing import CliRunner

    store_run(open_store(str(tmp_path)), SAMPLES, about={"num_hidden_layers": told})
    done = CliRunner().invoke(app, ["stats", str(tmp_path), "--layers", layers, "--json"])
    assert done.exit_code == 0, done.output
    assert [row["layer"] for row in json.loads(done.output)["layers"]] == expected


@pytest.mark.parametrize("told", [1 - 10**4300, 10**400, 1 << 21, 0, -1, True, "5", [5]], ids=range(8))
def test_a_number_of_layers_that_no_model_has_is_none(tmp_path: Path, told: object) -> None:
    run = Run(store_run(open_store(str(tmp_path)), SAMPLES, about={"num_hidden_layers": told}).place.root)
    with pytest.raises(ConfigError, match=r"expected layer ids with commas, such as 2,15,27, got '2,last'"):
        run_stats(str(tmp_path), (), layers="2,last", points=None, max_tokens=None, skip_first=0, as_json=True)
    with pytest.raises(ConfigError, match="expected a run with its model's number of layers, got none"):
        num_layers_of(run, ExportOptions())
    assert num_layers_of(run, ExportOptions(num_layers=30)) == 30
    assert stream_place(run.at(0), 2) == ("hidden_states", 2)
    assert " of 0…" not in _what_ran(gather_facts(run))


def test_stored_statistics_can_be_read_and_wrong_ones_are_not_stored(tmp_path: Path) -> None:
    """Squares of float32 are far beyond the numbers of other objects. What no reader would accept is not stored."""
    sample = random_sample("a", 5, layer_ids=(2,), dtype="float32", odd=False)
    sample.states[2, 0, 3] = np.float32(3e38).view(np.uint32)
    run = Run(store_run(open_store(str(tmp_path)), [sample]).place.root)
    found = compute_statistics(run, [2])
    store_statistics(run, found)
    assert read_statistics(run).layers[2].max_norm == found.layers[2].max_norm > 2e38
    assert verify_run(run.place.root).problems == []
    own = found.layers[2]
    for change in ({"max_norm": -1.0}, {"mean": own.mean * np.nan}, {"variance": own.variance[1:]}, {"tokens": -1}):
        with pytest.raises(FormatError, match=r"statistics/0002\.json: .*expected"):
            store_statistics(run, RunStatistics({2: replace(own, **change)}))
    assert read_statistics(run).layers[2].max_norm == own.max_norm


@pytest.mark.parametrize("version", [1, 2])
def test_gc_keeps_statistics_and_removes_unfinished_files(tmp_path: Path, version: int) -> None:
    from typer.testing import CliRunner

    run = run_at(tmp_path, version)
    store_statistics(run, compute_statistics(run, [2, 15]))
    folder = tmp_path / run.place.folder / "statistics"
    (folder / ".hsx-unfinished-1").write_bytes(b"half")
    done = CliRunner().invoke(app, ["gc", str(tmp_path), "--delete", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["unfinished"] == [f"{run.place.folder}/statistics/.hsx-unfinished-1".lstrip("/")]
    assert found["garbage"] == found["removed_runs"] == []
    assert sorted(path.name for path in folder.iterdir()) == ["0002.json", "0015.json"]
    assert set(read_statistics(run).layers) == {2, 15}


@pytest.mark.parametrize("version", [1, 2])
def test_verify_names_only_damaged_statistics(tmp_path: Path, version: int) -> None:
    run = run_at(tmp_path, version)
    store_statistics(run, compute_statistics(run, [2, 15, 30]))
    run.store.put("statistics/notes.json", [b"another program's"])
    assert verify_run(run.place.root).problems == []
    body = unsealed(run.store.get(statistics_name(15)))
    run.store.put(statistics_name(2), [b"{"])
    run.store.put(statistics_name(15), [json.dumps({**body, "absmax": body["absmax"][:-12]}).encode()])
    problems = verify_run(run.place.root).problems
    assert [problem.part for problem in problems] == [statistics_name(2), statistics_name(15)]
    assert "Run `hsx stats` again" in problems[1].message


def test_rm_lists_the_statistics_of_a_version_1_run_without_a_description(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    run = run_at(tmp_path, version=1)
    store_statistics(run, compute_statistics(run, [15]))
    (tmp_path / "run.json").unlink()
    told = CliRunner().invoke(app, ["rm", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "statistics/" in told.output
    done = CliRunner().invoke(app, ["rm", str(tmp_path), "--yes"])
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "statistics").glob("*"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mean_norm": 3.5}, "expected crc32c"),
        ({"layer": 15, "crc32c": None}, "expected statistics of hidden_states at layer 2, got .* layer 15"),
        ({"point": "q", "crc32c": None}, "at layer 2, got those of q"),
        ({"point": "\n" * 1000, "crc32c": None}, r"got those of (\\n){31}… at layer"),
        ({"max_norm": -1.0, "crc32c": None}, "no negative variance or norm"),
        ({"hidden_size": 0, "mean": "", "variance": "", "absmax": "", "crc32c": None}, "arrays of one length"),
    ],
)
def test_statistics_that_are_damaged_or_of_another_layer_are_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    run = run_at(tmp_path, 2)
    store_statistics(run, compute_statistics(run, [2]))
    body = {**json.loads(run.store.get(statistics_name(2))), **changes}
    run.store.put(statistics_name(2), [json.dumps({k: v for k, v in body.items() if v is not None}).encode()])
    with pytest.raises(FormatError, match=expected):
        read_statistics(run, [2])
    assert [problem.part for problem in verify_run(run.place.root).problems] == [statistics_name(2)]


def test_statistics_of_earlier_versions_are_read(tmp_path: Path) -> None:
    run = run_at(tmp_path, 2)
    store_statistics(run, compute_statistics(run, [2]))
    body = json.loads(run.store.get(statistics_name(2)))
    del body["crc32c"], body["point"]
    before = read_statistics(run, [2]).layers[2]
    run.store.put(statistics_name(2), [json.dumps(body).encode()])
    assert np.array_equal(read_statistics(run, [2]).layers[2].mean, before.mean)


def test_statistics_of_another_width_scale_nothing(tmp_path: Path) -> None:
    from hsx_dist import HiddenStatesDataset, TokenBatches
    from hsx_dist.reading.statistics import RunStatistics

    run = run_at(tmp_path, 2)
    own = compute_statistics(run, [2]).layers[2]
    narrow = {name: getattr(own, name)[:8] for name in ("mean", "variance", "absmax")}
    store_statistics(run, RunStatistics({2: replace(own, **narrow)}))
    batches = TokenBatches(HiddenStatesDataset(run, layers=[2]), 4, scaling="standard")
    with pytest.raises(FormatError, match=r"channels, got those of 8\. Run `hsx stats` again"):
        next(iter(batches))


def test_a_run_without_listed_layers_has_statistics_of_the_first_samples_layers(tmp_path: Path) -> None:
    from hsx_dist import HiddenStatesDataset, TokenBatches

    store = open_store(str(tmp_path / "run"))
    store_run(store, [random_sample("a", 9, layer_ids=(2, 15), hidden_size=16, odd=False)], info={"meaning": {}})
    run = open_run(store.url)
    store_statistics(run, compute_statistics(run))
    assert list(read_statistics(run).layers) == [2, 15]
    with pytest.raises(ConfigError, match=r"scaling: expected the layers of hidden_states, .* Name them"):
        TokenBatches(HiddenStatesDataset(run), 4, scaling="norm")
    assert next(iter(TokenBatches(HiddenStatesDataset(run, layers=[15]), 4, scaling="norm")))["hidden_states"].shape[1]


def test_rows_whose_statistics_could_not_be_stored_are_refused_before_they_are_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, [random_sample("a", 1, layer_ids=(2,), hidden_size=131_072, odd=False)])
    with pytest.raises(FormatError, match="expected rows of 1 to 130944 elements"):
        compute_statistics(open_run(store.url))


@pytest.mark.traced
def test_statistics_of_all_layers_together_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a few KB may have thousands of layers of many channels. All their arrays are in memory at once."""
    layers = tuple(range(10))
    store = open_store(str(tmp_path / "run"))
    store_run(store, [random_sample("a", 2, layer_ids=layers, hidden_size=50_000, odd=False)])
    run = open_run(store.url)
    monkeypatch.setattr(statistics, "_MOST_VALUES", 450_000)
    monkeypatch.setattr(statistics, "_VALUES", 1)
    with pytest.raises(ConfigError, match=r"at most 450000 channels .* got 10 layers of 50000\. Name fewer layers"):
        compute_statistics(run)
    trace_memory()
    assert len(compute_statistics(run, layers[:9]).layers) == 9
    peak = tracemalloc.get_traced_memory()[1]
    # The statistics, the states of two tokens as stored and as float32, and what a block takes.
    assert peak < 450_000 * (24 + 2 * 6) + (2 << 20)
