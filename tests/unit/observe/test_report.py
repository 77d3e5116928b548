"""The report: its numbers compared with the samples, and the page in a real browser."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsx_dist.errors import ConfigError, NotFound, RunError, SampleConsumed, SampleNotFound
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.place import Place, open_place
from hsx_dist.format.runs import beat, take_attempt
from hsx_dist.observe.report import write_report
from hsx_dist.observe.report.document import SETTINGS_SHOWN, escape
from hsx_dist.observe.report.facts import Timeline, gather_facts
from hsx_dist.observe.report.plots import Canvas
from hsx_dist.observe.report.prompt_attention import HEADS_DRAWN, TOKENS_DRAWN, drawn_layer, gather_attention
from hsx_dist.observe.report.states import MOST_LAYERS, gather_states, spread
from hsx_dist.reading import Run
from hsx_dist.reading.missing import stored_parts
from hsx_dist.reading.retention import Retention
from hsx_dist.reading.statistics import RunStatistics, compute_statistics, store_statistics
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.browser import browser_page, chromium_program
from tests.harness.hooked_model import HookedModel, tiny_model
from tests.harness.points import computed_sample, run_of
from tests.harness.runs import store_run, write_v1_run
from tests.harness.traced_memory import trace_memory
from tests.unit.observe.conftest import HOSTILE

MIB = 1 << 20

needs_chromium = pytest.mark.skipif(chromium_program() is None, reason="chromium is missing: apt-get install chromium")


def test_facts_are_those_of_the_receipts_and_headers(small_run: Store):
    run = Run(small_run)
    facts = gather_facts(run)
    assert facts.counts["samples"] == 9
    assert facts.counts["tokens"] == int(facts.timeline.tokens.sum()) == sum(5 + 9 * i for i in range(9))
    assert facts.refused == [("expected a text, got nothing in row …", 2)]
    assert [n for _, n in facts.failed] == [1]
    assert [s.layer for s in facts.layer_sizes] == [2, 15, 30]
    assert sum(s.raw for s in facts.layer_sizes) == facts.counts["raw_bytes"]
    assert sum(s.stored for s in facts.layer_sizes) < facts.counts["stored_bytes"]
    (attempt,) = facts.attempts
    assert (attempt.host, attempt.state, attempt.counted["store_wait_seconds"]) == ("here", "complete", 2.5)


@pytest.mark.parametrize(("attempts", "lines"), [([1, 1], 0), ([1, 2] * 500, 1), (list(range(500)), 40)])
def test_each_attempt_has_one_line_in_the_throughput(attempts: list[int], lines: int) -> None:
    n = len(attempts)
    timeline = Timeline(np.arange(n, dtype=np.float64), np.array(attempts), *(np.ones((3, n), np.int64)))
    assert Canvas().throughput(timeline).count("stroke-dasharray") == 2 * lines


def test_numbers_of_states_are_those_of_the_samples(small_run: Store):
    run = Run(small_run)
    keys = ["row-2", "row-5"]
    numbers = gather_states(run, keys, ["row-5"])
    assert numbers is not None
    states = [np.asarray(run[k].load(framework="numpy")["hidden_states"], np.float64)[1:] for k in keys]
    every = np.concatenate(states)
    norm = np.linalg.norm(every, axis=2)
    np.testing.assert_allclose(numbers.norms[2], np.median(norm, axis=0), rtol=1e-5)
    unit = every / norm[:, :, None]
    np.testing.assert_allclose(numbers.similarity, np.einsum("tlh,tmh->lm", unit, unit) / len(every), atol=1e-5)
    mean = np.abs(every).mean(axis=0)
    loudest = (mean / np.median(mean, axis=1, keepdims=True)).max(axis=0).argmax()
    assert numbers.channels[0] == loudest
    (shown,) = numbers.chosen
    np.testing.assert_array_equal(shown.token_ids, run["row-5"].token_ids("numpy"))
    assert shown.norms.shape == (50, 3)


def test_samples_are_spread_over_the_run():
    keys = [str(i) for i in range(10)]
    assert spread(keys, 3) == ["0", "4", "9"]
    assert spread(keys, 1) == ["0"]
    assert spread(keys, 99) == keys


@pytest.mark.traced
def test_states_are_computed_with_block_by_block() -> None:
    """A sample of a few KB may have many MB of states. Results between take several times as much."""
    store = MemoryStore()
    samples = [random_sample(f"k{i}", 1024, layer_ids=(1, 2), hidden_size=4096, odd=False) for i in range(2)]
    store_run(store, samples, codec=NoneCodec())
    run = Run(store)
    trace_memory()
    numbers = gather_states(run, ["k0", "k1"], ["k1"])
    peak = tracemalloc.get_traced_memory()[1]
    assert numbers is not None
    assert (numbers.samples, numbers.tokens, numbers.norms.shape) == (2, 2 * 1023, (5, 2))
    np.testing.assert_allclose(np.diag(numbers.similarity), 1, rtol=1e-5)
    # The states as float32 and as stored, and the results of a block.
    assert peak < 32 * MIB + 16 * MIB + 32 * MIB


def test_non_finite_rows_do_not_affect_the_figures(small_run: Store):
    numbers = gather_states(Run(small_run), ["row-7"], ["row-7"])
    assert numbers is not None
    assert np.isfinite(numbers.norms).all()
    assert np.isfinite(numbers.similarity).all()
    assert not np.isfinite(numbers.chosen[0].norms).all()


@pytest.mark.traced
def test_only_some_of_many_layers_are_compared(monkeypatch: pytest.MonkeyPatch):
    """A small run may have thousands of layers. A product of [T, L, L] would take gigabytes."""
    store = MemoryStore()
    many = random_sample("a", 100, layer_ids=tuple(range(1000)), hidden_size=2, chunk_tokens=100, odd=False)
    store_run(store, [many])
    run = Run(store)
    trace_memory()
    numbers = gather_states(run, ["a"], ["a"])
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    assert numbers is not None
    assert len(numbers.layer_ids) == MOST_LAYERS
    assert (numbers.layer_ids[0], numbers.layer_ids[-1]) == (0, 999)
    states = run["a"].load([0, 999], (1, 100), framework="numpy")["hidden_states"].astype(np.float64)
    unit = states / np.linalg.norm(states, axis=2, keepdims=True)
    np.testing.assert_allclose(numbers.similarity[0, -1], (unit[:, 0] * unit[:, 1]).sum(1).mean(), atol=1e-5)
    drawn: list[int] = []
    monkeypatch.setattr("matplotlib.axes.Axes.bar", lambda self, at, *_, **__: drawn.append(len(at)))  # noqa: ARG005
    Canvas().layer_sizes(gather_facts(run).layer_sizes)
    assert drawn == [MOST_LAYERS]


def test_the_norms_of_all_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsx_dist.observe.report.states.HELD_BYTES", 800)
    store = open_store(str(tmp_path))
    keys = [f"k{i}" for i in range(8)]
    store_run(store, [random_sample(key, 100, layer_ids=(2,), hidden_size=1, odd=False) for key in keys])
    numbers = gather_states(Run(store), keys, [])
    assert numbers is not None
    assert 0 < 4 * numbers.tokens <= 800


@pytest.mark.slow
def test_text_of_users_is_escaped_in_the_page(small_run: Store):
    page = write_report(small_run, chosen=[HOSTILE], decode=lambda ids: ["<b>&" for _ in ids])
    assert "<script" not in page
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert not re.search(r"<img|<link|<iframe|@import", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_statistics_that_are_stored_with_a_run_are_shown() -> None:
    store = MemoryStore()
    store_run(store, [random_sample(f"s{i}", 20, seed=i, odd=False) for i in range(2)])
    run = Run(store)
    assert 'id="statistics"' not in write_report(store)
    found = compute_statistics(run, [15], skip_first=1).layers[15]
    point = replace(found, layer=2, point="mlp_out", mean_norm=2000.0)
    store_statistics(run, RunStatistics({15: found}))
    store_statistics(run, RunStatistics({2: point}))
    section = write_report(store).split('id="statistics"')[1].split("</section>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", section)[1:]]
    assert [row[:4] for row in rows] == [["hidden_states", "15", "38", "1"], ["mlp_out", "2", "38", "1"]]
    states = np.concatenate([s.load([15], (1, 20), framework="numpy")["hidden_states"] for s in run]).astype(float)
    assert rows[0][4] == f"{np.linalg.norm(states, axis=2).mean():.4g}"
    assert rows[1][4] == "2000"


def test_a_run_without_samples_gives_a_page_too(tmp_path: Path):
    store = open_store(str(tmp_path / "new"))
    with pytest.raises(RunError):
        write_report(store)
    write_v1_run(store, {"meaning": {"model": "m", "layers": [1]}})
    assert "not started" in write_report(store)
    take_attempt(store, {})
    assert "no heartbeat" in write_report(store)


def test_an_attempt_without_a_final_state_is_shown_as_vanished(tmp_path: Path):
    store = open_store(str(tmp_path / "new"))
    write_v1_run(store, {"meaning": {"model": "m", "layers": [1]}, "settings": {"pool": "ray", "max_replicas": 1}})
    for number in (1, 2):
        take_attempt(store, {})
        beat(store, number, 1, "running")
    assert [a.state for a in gather_facts(Run(store)).attempts] == ["vanished", "running"]
    page = write_report(store)
    assert "None so far" in page
    assert "1 replica<" in page


@pytest.mark.traced
def test_heartbeats_of_many_attempts_are_not_kept(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new"))
    write_v1_run(store, {"meaning": {"model": "m", "layers": [1]}})
    progress = {"seconds": 2, "counted": {"put_seconds": 0.5}, "other": [{"a": {}}] * 5_000}
    for number in range(1, 6):
        take_attempt(store, {"host": "a" * 1_000_000})
        beat(store, number, 1, "failed", progress)
    trace_memory()
    attempts = gather_facts(Run(store)).attempts
    kept, _ = tracemalloc.get_traced_memory()
    assert kept < 1 << 20
    assert [(a.progress["seconds"], a.counted["put_seconds"]) for a in attempts] == [(2.0, 0.5)] * 5


def test_the_report_has_a_bounded_text_of_settings(tmp_path: Path):
    store = open_store(str(tmp_path / "deep"))
    nested: Any = list(range(20_000))
    for _ in range(150):  # the report indents each number by the depth
        nested = [nested]
    write_v1_run(store, {"meaning": {"model": "m", "layers": [1]}, "settings": {"nested": nested}})
    page = write_report(store)
    assert "has all settings" in page
    assert len(page) < 2 * SETTINGS_SHOWN


def test_a_credential_that_an_older_run_kept_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from hsx_dist.cli import main
    from tests.harness.runs import write_v1_run

    store = open_store(str(tmp_path / "old"))
    path = "s3://key:hunter2/x@bucket/rows.jsonl"
    write_v1_run(store, {"meaning": {"model": path, "layers": [1]}, "settings": {"input": {"path": path}}})
    page = write_report(store)
    assert "s3://(not shown)" in page
    for command in (["show", "--json"], ["show"], ["top", "--once"]):
        with pytest.raises(SystemExit):
            main([*command, str(tmp_path / "old")])
    for text in (page, capsys.readouterr().out):
        assert "hunter2" not in text


def test_a_missing_sample_raises(small_run: Store):
    with pytest.raises(SampleNotFound, match="no-such"):
        write_report(small_run, chosen=["no-such"])


def consumed_run() -> tuple[MemoryStore, Place]:
    """Three parts of two samples each."""
    store = MemoryStore()
    samples = [random_sample(f"k{i}", 30, layer_ids=(1, 2), hidden_size=64, odd=False) for i in range(6)]
    store_run(store, samples, per_part=2, codec=NoneCodec())
    return store, open_place(store)


def test_a_run_of_which_parts_were_removed_or_lost_gives_a_page():
    store, place = consumed_run()
    used = Retention(place)
    assert "of them" not in write_report(store)
    used.ack("k0", "k1")
    page = write_report(store)
    assert "<b>1</b><span>of them removed after use" in page
    assert "of 4 samples" in page
    store.delete(next(name for name in store.objects if "000002.safetensors" in name))
    page = write_report(store)
    assert "<b>1</b><span>of them removed after use" in page
    assert "<b>1</b><span>of them lost" in page
    assert "of 2 samples" in page
    with pytest.raises(SampleConsumed):
        write_report(store, chosen=["k0"])
    with pytest.raises(NotFound, match="Run the same extraction again"):
        write_report(store, chosen=["k2"])
    used.ack("k4", "k5")
    assert "<b>6</b><span>samples" in write_report(store)


def test_parts_that_are_removed_while_the_report_reads_them_are_left_out(monkeypatch: pytest.MonkeyPatch):
    store, place = consumed_run()
    run = Run(store)
    stored = stored_parts(place.store)
    monkeypatch.setattr("hsx_dist.observe.report.facts.stored_parts", lambda _: stored)
    Retention(place).ack("k0", "k1")
    assert gather_facts(run).codecs == {"none": 2}
    numbers = gather_states(run, ["k0", "k3"], ["k1", "k5"])
    assert numbers is not None
    assert numbers.samples == 2
    assert [shown.key for shown in numbers.chosen] == ["k5"]
    assert gather_states(run, ["k0"], ["k1"]) is None


#: The drawn layers, of the stored ones.
STORED, DRAWN = (0, 1, 2, 3, 4), (0, 1, 3, 4)


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store, np.ndarray[Any, Any]]:
    """A tiny model with 2 key heads for 4 query heads, a run of its queries and keys, and the attention of ``s-1``."""
    model = tiny_model("llama", tmp_path_factory.mktemp("model"))
    hooked = HookedModel(model)
    ids = [np.random.default_rng(i).integers(3, 500, n).tolist() for i, n in enumerate((9, 60, 70))]
    points = {"q": STORED, "k": STORED}
    made = [computed_sample(f"s-{i}", of, hooked.rows(of), points, 32).segments(i) for i, of in enumerate(ids)]
    store = open_store(str(tmp_path_factory.mktemp("attended") / "run"))
    run_of(*made, store=store, meaning={"model": HOSTILE}, about={"num_hidden_layers": 5})
    hooked = HookedModel(model)
    with torch.inference_mode():
        out = hooked.model(torch.tensor([ids[1]]), output_attentions=True)
    return model, store, torch.stack(out.attentions)[:, 0].numpy()


def test_attention_of_one_prompt_is_transformers(attended: tuple[Path, Store, np.ndarray[Any, Any]]) -> None:
    model, store, right = attended
    found = gather_attention(Run(store), ["s-1", "s-2"], str(model))
    assert found is not None
    assert (found.key, found.num_tokens, found.stored, found.missing) == ("s-1", 60, STORED, "")
    assert [layer.layer for layer in found.layers] == list(DRAWN)
    np.testing.assert_array_equal(found.token_ids, Run(store)["s-1"].token_ids("numpy")[:TOKENS_DRAWN])
    for layer in found.layers:
        assert (layer.heads, layer.num_heads) == ((0, 1, 2, 3), 4)
        whole = right[layer.layer][:, :TOKENS_DRAWN, :TOKENS_DRAWN]
        np.testing.assert_allclose(layer.patterns, whole, atol=1e-5)
        np.testing.assert_allclose(layer.last, whole[:, -1].mean(0), atol=1e-5)


def test_attention_is_drawn_by_the_viewers_model_alone(
    attended: tuple[Path, Store, np.ndarray[Any, Any]], small_run: Store, tmp_path: Path
) -> None:
    model, store, right = attended
    assert 'id="attention"' not in write_report(small_run, model=str(model))  # the run has neither queries nor keys
    page = write_report(store)
    assert "Name the model: " in page
    assert "Attention patterns of layer" not in page
    page = write_report(store, chosen=["s-1"], model=str(model), decode=lambda ids: [f"<{i}>" for i in ids])
    section = page.split('id="attention"')[1].split("</section>")[0]
    assert re.findall('aria-label="(.*?)"', section) == [f"Attention patterns of layer {k}" for k in DRAWN]
    assert (
        "Shown are the first 48 of 60 tokens, 4 of 5 stored layers and all 4 heads (at most 48, 4 and 16)." in section
    )
    weights = re.findall(r'title="token \d+: ([\d.]+)">&lt;\d+&gt;<', section)
    expected = right[list(DRAWN)][:, :, 47, :48].mean(1).reshape(-1)
    assert weights == [f"{x:.3f}" for x in expected]
    # Another model's heads: the page reports that, and shows all the rest.
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    page = write_report(store, model=str(other))
    assert "Not drawn:" in page
    assert "expected points of 8 query and 2 key heads" in page
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    with pytest.raises(ConfigError, match="got model_type 'gemma2'"):
        write_report(store, model=str(other))


def test_only_some_of_many_heads_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    monkeypatch.setattr("matplotlib.axes.Axes.imshow", _count_images(drawn))
    patterns = np.tile(np.tri(5, dtype=np.float32), (64, 1, 1))
    layer = drawn_layer(3, patterns)
    assert layer.heads == tuple(spread(range(64), HEADS_DRAWN))
    assert layer.num_heads == 64
    Canvas().attention(layer)
    assert drawn == [(5, 5)] * HEADS_DRAWN


def _count_images(drawn: list[tuple[int, ...]]) -> Any:
    from matplotlib.axes import Axes

    theirs = Axes.imshow

    def imshow(axes: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append(image.shape)
        return theirs(axes, image, *args, **kwargs)

    return imshow


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_attention(attended: tuple[Path, Store, np.ndarray[Any, Any]], tmp_path: Path) -> None:
    model, store, _ = attended
    path = tmp_path / "report.html"
    path.write_text(write_report(store, model=str(model)), encoding="utf-8")
    with browser_page() as (page, seen):
        page.goto(path.as_uri())
        maps = page.locator("#attention svg image")
        assert maps.count() >= 4 * len(DRAWN)
        for i in range(maps.count()):
            box = maps.nth(i).bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) > 5
        page.set_viewport_size({"width": 480, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= 480
    assert seen.errors == []
    assert seen.requests == [path.as_uri()]


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_every_plot_without_an_error_or_a_request(small_run: Store, tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_text(write_report(small_run), encoding="utf-8")
    with browser_page() as (page, seen):
        page.goto(path.as_uri())
        assert page.title() == small_run.url
        plots = page.locator("svg[role=img]")
        assert [plots.nth(i).get_attribute("aria-label") for i in range(plots.count())] == [
            "Throughput over time",
            "Where time went",
            "Stored bytes by layer",
            "Lengths of samples",
            "Norms by layer",
            "Channels that stand out",
            "Similarity between layers",
        ]
        for i in range(plots.count()):
            box = plots.nth(i).bounding_box()
            assert box is not None
            assert box["width"] > 200
            assert box["height"] > 100
        # Nothing overflows to the right, on a screen of this width and on a narrow one.
        for width in (1200, 480):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#samples .tokens span[title]").count() > 100
    assert seen.errors == []
    assert seen.requests == [path.as_uri()]


def test_bidirectional_characters_are_escaped():
    assert escape("<b>\u202egnp\x1b\x9b") == "&lt;b&gt;\\u202egnp\\x1b\\x9b"
