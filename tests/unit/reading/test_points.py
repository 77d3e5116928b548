"""Points of a model as read: rows merged over shards in the model's order, and never from two samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsx_dist.cli import main
from hsx_dist.errors import ConfigError, FormatError, HsxError, IntegrityError, SampleNotFound
from hsx_dist.format.codecs import SplitCodec, ZstdCodec
from hsx_dist.format.container import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.runs import load_manifest
from hsx_dist.page import token_hash
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.collate import pack, pad
from hsx_dist.reading.column import StoredPoint
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.load import load_object
from hsx_dist.reading.map_dataset import HiddenStatesMapDataset
from hsx_dist.reading.statistics import compute_statistics, read_statistics
from hsx_dist.reading.token_batches import TokenBatches
from hsx_dist.reading.verify import verify_run
from hsx_dist.serving.states_file import Range, StatesFile
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness import runs
from tests.harness.points import HEAD, PointSample, point_sample, run_of
from tests.harness.runs import RunWriter, Stored, whole, write_v1_run

CUTS = ((8,), (), (20, 30), ())


def expected(made: PointSample, name: str, layers: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
    rows = made.points[name]
    return rows if name != "q" else rows.reshape(*rows.shape[:2], -1, HEAD)


def bits(states: torch.Tensor) -> np.ndarray[Any, Any]:
    wide = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32, torch.int32: torch.uint32}[states.dtype]
    return states.contiguous().view(wide).numpy()


@pytest.mark.parametrize("codec", ["none", "zstd", "split"])
@pytest.mark.parametrize("cuts", [(), CUTS], ids=["whole", "cut"])
def test_rows_of_shards_are_merged(codec: str, cuts: Any) -> None:
    made, other = point_sample("a"), point_sample("b", 5, seed=9)
    segments = made.segments(0, cuts)
    run = run_of([*segments[::2], *other.segments(1)], segments[1::2], codec=codec)
    sample = run["a"]
    assert sample.num_tokens == 37
    assert sample.points == {
        "q": StoredPoint((3, 7), 48, 6, "bfloat16"),
        "mlp_out": StoredPoint((7,), 24, 0, "float32"),
        "topk_ids": StoredPoint((3, 7), 4, 0, "int32"),
    }
    loaded = sample.load(points=["q", "mlp_out", "topk_ids"])
    assert {name: tuple(x.shape) for name, x in loaded["points"].items()} == {
        "q": (37, 2, 6, HEAD),
        "mlp_out": (37, 1, 24),
        "topk_ids": (37, 2, 4),
    }
    for name, states in loaded["points"].items():
        assert np.array_equal(bits(states), expected(made, name)), name
    assert np.array_equal(loaded["token_ids"], made.token_ids)
    assert {name: ids.tolist() for name, ids in loaded["layer_ids"].items()} == {
        "q": [3, 7],
        "mlp_out": [7],
        "topk_ids": [3, 7],
    }
    assert (loaded["key"], "hidden_states" in loaded) == ("a", False)


@pytest.mark.parametrize("cuts", [(), CUTS], ids=["whole", "cut"])
@pytest.mark.parametrize("tokens", [(0, 64), (5, 9), (30, 37), (8, 8), (-3, None), (0, 0)])
def test_a_range_of_tokens_and_layers_in_the_order_wanted(cuts: Any, tokens: Any) -> None:
    made = point_sample("a")
    sample = run_of(made.segments(0, cuts))["a"]
    span = slice(*tokens)
    loaded = sample.load([7, 3], tokens, points=["q", "topk_ids"], framework="numpy")
    assert np.array_equal(loaded["points"]["topk_ids"], made.points["topk_ids"][span, ::-1])
    assert loaded["points"]["topk_ids"].dtype == np.int32
    assert np.array_equal(
        bits(sample.load([7, 3], tokens, points=["q"])["points"]["q"]), expected(made, "q")[span, ::-1]
    )
    assert np.array_equal(loaded["token_ids"], made.token_ids[span])
    one = sample.point("q", 7, tokens)
    assert np.array_equal(bits(one), expected(made, "q")[span, 1])
    assert sample.point("mlp_out", 7, tokens).shape == (len(made.token_ids[span]), 24)


def test_hidden_states_do_not_change_when_other_points_are_stored() -> None:
    made = point_sample("a", hidden=True)
    plain = random_sample("p", 9)
    run = run_of([*made.segments(0), whole(plain, 1)])
    sample = run["a"]
    loaded = sample.load()
    assert np.array_equal(bits(loaded["hidden_states"]), made.points["hidden_states"])
    assert loaded["layer_ids"].tolist() == [2, 30]
    assert sorted(loaded) == ["hidden_states", "key", "layer_ids", "meta", "token_ids"]
    assert (sample.layer_ids, sample.dtype, sample.hidden_size) == ((2, 30), "bfloat16", 24)
    assert np.array_equal(bits(sample.layer(30)), made.points["hidden_states"][:, 1])
    both = sample.load(points=["hidden_states", "q"])["points"]
    assert np.array_equal(bits(both["hidden_states"]), made.points["hidden_states"])
    assert run["p"].points == {"hidden_states": StoredPoint((2, 15, 30), 24, 0, "bfloat16")}
    assert np.array_equal(bits(run["p"].load(points=["hidden_states"])["points"]["hidden_states"]), plain.states)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.load(),
        lambda s: s.layer(3),
        lambda s: s.layer_ids,
        lambda s: s.dtype,
        lambda s: s.hidden_size,
        lambda s: s.load_carrier(),
        lambda s: s.load(points=["z"]),
        lambda s: s.point("hidden_states", 3),
    ],
)
def test_missing_points_are_refused_with_the_stored_points(ask: Callable[[Any], Any]) -> None:
    sample = run_of(point_sample("a").segments(0))["a"]
    with pytest.raises(
        ConfigError,
        match=r"^sample 'a': expected one of the points q, mlp_out, topk_ids, got '\w+'\. Request one of these$",
    ):
        ask(sample)


@pytest.mark.parametrize("points", ["q", [], ""])
def test_points_are_a_list_of_names(points: Any) -> None:
    with pytest.raises(ConfigError, match="expected a list of names"):
        run_of(point_sample("a").segments(0))["a"].load(points=points)


def test_a_layer_that_one_of_the_points_lacks_is_named() -> None:
    sample = run_of(point_sample("a").segments(0))["a"]
    with pytest.raises(ConfigError, match=r"layers: expected layers of point 'mlp_out' among \[7\], got \[3\]"):
        sample.load([3], points=["q", "mlp_out"])
    with pytest.raises(ConfigError, match=r"point 'q' among \[3, 7\], got \[14\]\. Request stored layers only$"):
        sample.point("q", 14)  # which has no argument ``layers``


def test_findings_of_the_sanity_checks_name_their_point() -> None:
    made = point_sample("a", hidden=True)
    segments = [
        (sample, replace(s, meta={"bad": {"zero_layers": [3]}} if s.column in (0, 4) else {}), row)
        for sample, s, row in made.segments(0)
    ]
    assert run_of(segments)["a"].meta == {
        "bad": [
            {"start": 0, "stop": 37, "point": "q", "zero_layers": [3]},
            {"start": 0, "stop": 37, "zero_layers": [3]},
        ]
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"zero_layers": [[3]]},
        {"zero_layers": [3] * 9},
        {"zero_layers": {"3": 1}},
        {"nonfinite_rows": {"3": [1]}},
        {"other": [[]]},
        [],
        3,
    ],
)
def test_findings_that_no_writer_stores_are_skipped(bad: Any) -> None:
    segments = [
        (sample, replace(s, meta={"bad": bad, "x": 1}), row) for sample, s, row in point_sample("a").segments(0)
    ]
    assert run_of(segments)["a"].meta == {"x": 1}
    more = {"nonfinite_rows": {"3": 2}, "zero_layers": [7]}
    segments = [
        (sample, replace(s, meta={"bad": (bad if isinstance(bad, dict) else {}) | more}), row)
        for sample, s, row in segments
    ]
    entry = {"start": 0, "stop": 37, "point": "q", **more}
    assert run_of(segments)["a"].meta["bad"][0] == entry


def object_of(segments: Sequence[Stored]) -> MemoryStore:
    encoded = []
    for sample, segment, _ in segments:
        encoder = SegmentEncoder(SplitCodec())
        for page in sample.pages(segment):
            encoder.add(page)
        encoded.append(encoder.finish())
    store = MemoryStore()
    store.put("a.safetensors", build_part(encoded, SplitCodec(), {}).buffers)
    return store


def test_an_object_without_receipts_is_read() -> None:
    made = point_sample("a")
    store = object_of(made.segments(0, CUTS)[::-1])
    loaded = load_object(store, "a.safetensors", points=["q"])
    assert np.array_equal(bits(loaded["points"]["q"]), expected(made, "q"))


@pytest.mark.parametrize("lost", range(7))
def test_an_object_without_a_segment_of_a_column_is_a_piece(lost: int) -> None:
    segments = point_sample("a").segments(0, CUTS)
    assert len(segments) == 7
    with pytest.raises(SampleNotFound, match="only some segments"):
        load_object(object_of(segments[:lost] + segments[lost + 1 :]), "a.safetensors", points=["topk_ids"])


@pytest.mark.parametrize("changes", [{"columns": 9, "column": 8}, {"columns": 9}, {"total": 38}])
def test_an_object_whose_columns_say_other_things_of_their_sample_is_a_piece(changes: dict[str, Any]) -> None:
    segments = facts(point_sample("a").segments(0), 3, **changes)
    with pytest.raises(SampleNotFound, match="only some segments"):
        load_object(object_of(segments), "a.safetensors", points=["topk_ids"])


# -- mutations: segments that must never be joined ---------------------------------------------------------------


def facts(segments: Sequence[Stored], column: int, /, **changes: Any) -> list[Stored]:
    """The segments, with other facts for those of one column."""
    return [(x, replace(s, **changes) if s.column == column else s, row) for x, s, row in segments]


def test_a_missing_column_is_no_sample() -> None:
    made = point_sample("a")
    for column in range(4):
        run = run_of([stored for stored in made.segments(0) if stored[1].column != column])
        assert list(run.keys()) == []
        with pytest.raises(SampleNotFound):
            run["a"]


@pytest.mark.parametrize("name", ["key", "input_ids", "token_ids", "layer_ids", "meta", "loss_mask"])
def test_a_point_with_the_name_of_another_member_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an item it would replace the key, the ids or the mask, or be replaced."""
    segments = facts(point_sample("a").segments(0), 1, point=name)
    with pytest.raises(ValueError, match=f"expected a name that no other member of a sample has, got {name}"):
        run_of(segments)
    monkeypatch.setattr("hsx_dist.format.container_write.column_error", lambda _: None)
    run = run_of(segments)
    for ask in (
        lambda: list(HiddenStatesDataset(run, points=["q"], framework="numpy")),
        lambda: compute_statistics(run, point=name, layers=[7]),
    ):
        with pytest.raises(HsxError, match=rf"expected a .*name .*, got {name}"):
            ask()


@pytest.mark.parametrize("name", ["key", "input_ids", "loss_mask"])
def test_names_in_an_item_are_different(name: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a different name for each array, got {name} for several"):
        HiddenStatesDataset(run_of(point_sample("a").segments(0)), points=[name])


@pytest.mark.parametrize(("collate", "name"), [(pad, "attention_mask"), (pad, "lengths"), (pack, "position_ids")])
def test_a_batch_replaces_no_array(collate: Callable[..., Any], name: str) -> None:
    run = run_of(point_sample("a").segments(0))
    items = list(HiddenStatesDataset(run, points=["q"], framework="torch", rename={"q": name}))
    with pytest.raises(ConfigError, match=f"name of a batch's own member, got {name}"):
        collate(items)


def test_other_layers_in_a_batch_are_shown_in_part() -> None:
    items = [{"input_ids": torch.zeros(1), "layer_ids": torch.arange(i, i + 1000)} for i in range(2)]
    for collate in (pad, pack):
        with pytest.raises(ConfigError, match="expected the same layers in all items") as e:
            collate(items)
        assert len(str(e.value)) < 400


def test_a_list_of_stored_names_is_shown_in_part() -> None:
    made = point_sample("a")
    columns = [(made.columns[1][0], {"point": f"p{'x' * 60}{i}", "column": i}) for i in range(100)]
    many = run_of(replace(made, columns=tuple(columns)).segments(0))
    attached = {f"a{'x' * 60}{i}": np.zeros(1, np.int64) for i in range(100)}
    store = MemoryStore()
    write_v1_run(store, {"meaning": {}, "settings": {}})
    RunWriter(store, attached=attached).put([whole(random_sample("a", 3))])
    for ask in (
        lambda: many.layers_of("q"),
        lambda: many["a"].load(points=["q"]),
        lambda: list(HiddenStatesDataset(Run(store), rename={"label": "label"}, framework="numpy")),
    ):
        with pytest.raises(ConfigError) as e:
            ask()
        assert len(str(e.value)) < 1500


def test_a_column_of_another_attempt_is_never_taken() -> None:
    one, other = point_sample("a"), point_sample("a", seed=5)
    other = replace(other, token_ids=one.token_ids, columns=tuple(
        (replace(x, token_ids=one.token_ids), c) for x, c in other.columns
    ))  # fmt: skip
    store = MemoryStore()
    write_v1_run(store, {"meaning": {}, "settings": {}})
    first, second = RunWriter(store), RunWriter(store, name="v")
    first.put(one.segments(0)[:3])
    second.put(other.segments(0)[3:])
    assert list(Run(store).keys()) == []
    second.put(other.segments(0)[1:3])
    assert list(Run(store).keys()) == []
    second.put(other.segments(0)[:1])
    loaded = Run(store)["a"].load(points=["q", "topk_ids"])["points"]
    assert np.array_equal(bits(loaded["q"]), expected(other, "q"))
    assert np.array_equal(bits(loaded["topk_ids"]), expected(other, "topk_ids"))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: facts(facts(s, 0, shard=0), 2, shard=0),  # the same shard twice
        lambda s: facts(s, 2, point="k", shards=1, shard=0),  # the other shard is missing
        lambda s: facts(s, 1, point="q", shard=1, shards=2),  # a shard of another point
        lambda s: facts(s, 2, head=4),
        lambda s: facts(s, 2, shards=3),
    ],
)
def test_columns_that_are_not_the_shards_of_a_point_are_refused(change: Callable[[Any], Any]) -> None:
    sample = run_of(change(point_sample("a").segments(0)))["a"]
    for ask in (lambda: sample.points, lambda: sample.load(points=["q"]), lambda: sample.point("q", 3)):
        with pytest.raises(IntegrityError, match="expected the shards of point"):
            ask()


def test_verify_finds_columns_that_are_no_whole_point() -> None:
    good, bad = point_sample("a").segments(0), facts(point_sample("b").segments(1), 2, point="k", shards=1, shard=0)
    assert verify_run(run_of(good).place.root).ok
    [problem] = verify_run(run_of(good, bad).place.root).problems
    assert "'b'" in problem.message or "b: expected the shards of point" in problem.message


def test_points_can_have_different_layers() -> None:
    run = run_of(point_sample("a", odd=False).segments(0))
    loaded = run["a"].load({"q": [7], "mlp_out": [7]}, points=["q", "mlp_out"], framework="numpy")
    both = run["a"].load(points=["q", "mlp_out"], framework="numpy")["points"]
    assert np.array_equal(loaded["points"]["q"], both["q"][:, 1:])
    data = HiddenStatesDataset(run, points=["q", "mlp_out"], layers={"q": [7, 3]}, framework="numpy")
    [item] = data
    assert np.array_equal(item["q"], both["q"][:, ::-1])
    assert np.array_equal(item["mlp_out"], both["mlp_out"])
    assert (data.layers_of("q"), data.layers_of("mlp_out")) == ((7, 3), (7,))
    with pytest.raises(ConfigError, match=r"got \['k'\]"):
        HiddenStatesDataset(run, points=["q"], layers={"k": [3]})


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_many_shards_of_few_bytes_are_refused_together(framework: Any) -> None:
    """Each shard alone may claim 64 MiB. Together they claim more than a part of some KiB can hold."""
    shards, tokens, width = 4, 64, 1 << 18
    made = RandomSample("a", np.zeros((tokens, 1, width), np.uint16), np.arange(tokens), (3,), "bfloat16", tokens)
    facts = {"point": "q", "shards": shards, "columns": shards, "sample_hash": token_hash(made.token_ids)}
    one = made.segments()[0]
    run = run_of([(made, replace(one, **facts, shard=i, column=i), 0) for i in range(shards)], codec="zstd")
    with pytest.raises(FormatError, match=f"got a header with {shards * tokens * width * 2} bytes"):
        run["a"].load(points=["q"], framework=framework)
    assert run["a"].load(points=["q"], tokens=(0, 8), framework=framework)["points"]["q"].shape == (8, 1, 4 * width)


def test_statistics_take_layers_by_their_ids_and_refuse_other_widths() -> None:
    a = random_sample("a", tokens=8, layer_ids=(3, 7), hidden_size=16, odd=False)
    turned = replace(a, key="b", states=a.states[:, ::-1].copy(), layer_ids=(7, 3))
    one, both = (
        compute_statistics(run_of(*([whole(s)] for s in samples), layers=(3, 7))) for samples in ([a], [a, turned])
    )
    for layer in (3, 7):
        np.testing.assert_allclose(both.layers[layer].mean, one.layers[layer].mean)
    narrow = random_sample("c", tokens=8, layer_ids=(3, 7), hidden_size=1, odd=False)
    with pytest.raises(FormatError, match="expected rows of 16 elements"):
        compute_statistics(run_of([whole(a)], [whole(narrow)], layers=(3, 7)))


def test_shards_are_ordered_by_what_they_say() -> None:
    """Columns may be in any order. Swapped shard numbers give other rows, which a comparison would detect."""
    made = point_sample("a")
    swapped = facts(facts(made.segments(0), 0, shard=0), 2, shard=1)
    rows = bits(run_of(swapped)["a"].load(points=["q"])["points"]["q"]).reshape(37, 2, -1)
    parts = made.points["q"][..., :16], made.points["q"][..., 16:]
    assert np.array_equal(rows, np.concatenate(parts[::-1], -1))
    assert not np.array_equal(rows, made.points["q"])


@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("other", range(4))
def test_columns_that_are_swapped_in_a_part_are_found(one: int, other: int) -> None:
    """The receipt names each column's object: an object under another column's name is not read."""
    if one == other:
        return
    made, store = point_sample("a"), MemoryStore()
    segments = made.segments(0)
    run = run_of(*([s] for s in segments), store=store)
    names = [proof.part for proof in load_manifest(store).samples["a"].segments]
    data = dict(store.objects)
    store.objects[names[one]], store.objects[names[other]] = data[names[other]], data[names[one]]
    run = Run(store)
    with pytest.raises(HsxError) as e:
        run["a"].load(points=["q", "mlp_out", "topk_ids"])
    assert isinstance(e.value, FormatError)


def test_a_receipt_that_swaps_two_columns_of_a_part_is_found() -> None:
    """Both columns agree in all else: length, part and token ids."""
    made, store = point_sample("a"), MemoryStore()
    columns = made.segments(0)
    alike = [columns[0], (columns[0][0], replace(columns[0][1], column=2, shard=0), 0), columns[1], columns[3]]
    run_of(alike, store=store)
    (name,) = [n for n in store.objects if n.startswith("manifest/")]
    body = json.loads(store.objects[name])["receipt"]
    at = body["segment_columns"].index("column")
    rows = body["segments"]
    rows[0][at], rows[1][at] = rows[1][at], rows[0][at]
    from hsx_dist.format.checksum import crc32c, crc32c_hex

    text = json.dumps(body, separators=(",", ":")).encode()
    store.objects[name] = b'{"crc32c":"%s","receipt":%s}' % (crc32c_hex(crc32c(text)).encode(), text)
    sample = Run(store)["a"]
    with pytest.raises(IntegrityError, match="as its receipt says"):
        sample.load(points=["q"])
    assert sum("as its receipt says" in problem.message for problem in verify_run(store).problems) == 2


def test_columns_of_other_tokens_are_found_without_receipts() -> None:
    made = point_sample("a")
    segments = made.segments(0)
    other = [(replace(x, token_ids=x.token_ids + 1) if s.column == 2 else x, s, row) for x, s, row in segments]
    with pytest.raises(IntegrityError, match="same token ids"):
        load_object(object_of(other), "a.safetensors", points=["q"])
    with pytest.raises(IntegrityError, match="same token ids"):
        load_object(object_of([(replace(x, token_ids=x.token_ids + 1) if s.column == 3 else x, s, row)
                               for x, s, row in segments]), "a.safetensors", points=["q", "topk_ids"])  # fmt: skip


# -- data sets and checks of a whole run --------------------------------------------------------------------------


def test_a_data_set_gives_points_under_their_names() -> None:
    made = [point_sample(key, n, seed=n) for key, n in (("a", 37), ("b", 5), ("c", 11))]
    run = run_of([stored for i, sample in enumerate(made) for stored in sample.segments(i)])
    dataset = HiddenStatesDataset(run, points=["q", "topk_ids"], layers=[7], max_tokens=20)
    items = list(dataset)
    assert [item["key"] for item in items] == ["a", "b", "c"]
    for item, sample in zip(items, made, strict=True):
        assert sorted(item) == ["input_ids", "key", "loss_mask", "q", "topk_ids"]
        assert np.array_equal(bits(item["q"]), expected(sample, "q")[:20, 1:])
        assert np.array_equal(bits(item["topk_ids"]), sample.points["topk_ids"][:20, 1:])
        assert np.array_equal(item["input_ids"], sample.token_ids[:20])
    batch = pad(items)
    assert batch["q"].shape == (3, 20, 1, 6, HEAD)
    assert batch["topk_ids"].dtype == torch.int32
    mapped = HiddenStatesMapDataset(run, points=["mlp_out"], rename={"mlp_out": "x", "key": None})
    assert np.array_equal(bits(mapped[1]["x"]), made[1].points["mlp_out"])
    assert sorted(mapped[1]) == ["input_ids", "loss_mask", "x"]
    with pytest.raises(ConfigError, match="got 'hidden_states'"):
        list(HiddenStatesDataset(run))
    with pytest.raises(ConfigError, match="a list of names"):
        HiddenStatesDataset(run, points="q")


def test_tokens_of_points_are_shuffled_together() -> None:
    made = [point_sample(key, n, seed=n) for key, n in (("a", 37), ("b", 5))]
    run = run_of([stored for i, sample in enumerate(made) for stored in sample.segments(i)])
    batches = list(TokenBatches(HiddenStatesDataset(run, points=["mlp_out", "q"]), 8))
    assert batches[0]["mlp_out"].shape == (8, 24)
    assert batches[0]["q"].shape == (8, 2, 6, HEAD)
    rows = {
        (int(token), bits(out).tobytes(), bits(q).tobytes())
        for batch in batches
        for token, out, q in zip(batch["input_ids"], batch["mlp_out"], batch["q"], strict=True)
    }
    assert rows == {
        (int(sample.token_ids[t]), sample.points["mlp_out"][t, 0].tobytes(), sample.points["q"][t].tobytes())
        for sample in made
        for t in range(len(sample.token_ids))
    }


@pytest.mark.parametrize(("framework", "dtype"), [("torch", torch.float64), ("numpy", np.float64)])
def test_batches_of_points_take_a_dtype_and_ids_keep_theirs(framework: Any, dtype: Any) -> None:
    run = run_of(point_sample("a").segments(0))
    dataset = HiddenStatesDataset(run, points=["mlp_out", "topk_ids"], framework=framework)
    batch = next(iter(TokenBatches(dataset, 8, dtype=dtype)))
    assert batch["mlp_out"].dtype == dtype
    assert str(batch["topk_ids"].dtype).endswith("int32")
    with pytest.raises(ConfigError, match=r"scaling: expected statistics of mlp_out at layers \[7\]"):
        TokenBatches(dataset, 8, scaling="norm")


def test_the_last_layer_of_a_point_is_that_of_the_last_decoder_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(point_sample("a", odd=False).segments(0), store=open_store(str(tmp_path)), about={"num_hidden_layers": 8})
    with pytest.raises(SystemExit, match="0"):
        main(["stats", str(tmp_path), "--points", "q,mlp_out", "--layers", "last", "--json"])
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert [(row["point"], row["layer"]) for row in rows] == [("q", 7), ("mlp_out", 7)]


def test_statistics_of_points_are_numpys_and_scale_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [point_sample("a", odd=False), point_sample("b", 9, seed=9, odd=False)]
    run = run_of(*(sample.segments(0) for sample in made), store=open_store(str(tmp_path)))
    with pytest.raises(SystemExit, match="0"):
        main(["stats", str(tmp_path), "--points", "q,mlp_out", "--json"])
    told = json.loads(capsys.readouterr().out)["layers"]
    assert [(row["point"], row["layer"]) for row in told] == [("q", 3), ("q", 7), ("mlp_out", 7)]
    with pytest.raises(SystemExit, match="0"):  # exports all points that are no ids, as the run has no hidden states
        main(["stats", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["layers"] == told
    rows = {
        name: np.concatenate([s.load(points=[name], framework="numpy")["points"][name] for s in run])
        for name in ("q", "mlp_out")
    }
    for name, x in rows.items():
        found = read_statistics(run, point=name)
        x = x.reshape(*x.shape[:2], -1).astype(np.float64)
        for i, own in enumerate(found.layers.values()):
            assert (own.point, own.tokens, own.samples) == (name, 46, 2)
            np.testing.assert_allclose(own.mean, x[:, i].mean(0), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(own.variance, x[:, i].var(0), rtol=1e-9)
    for wrong in ("topk_ids", "z"):
        with pytest.raises(ConfigError, match=rf"expected .*, got .*{wrong}"):
            compute_statistics(run, point=wrong)
    for framework in ("torch", "numpy"):
        data = HiddenStatesDataset(run, points=["q"], framework=framework)
        batch = np.asarray(next(iter(TokenBatches(data, 46, scaling="standard")))["q"])
        assert batch.shape == (46, 2, 6, HEAD)
        np.testing.assert_allclose(batch.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(batch.std(0), 1, atol=1e-3)
        one = HiddenStatesDataset(run, points=["q"], layers=[7], framework=framework)
        norms = np.linalg.norm(
            np.asarray(next(iter(TokenBatches(one, 46, scaling="norm")))["q"]).reshape(46, -1), axis=1
        )
        assert norms.mean() == pytest.approx(48**0.5, rel=1e-3)
    with pytest.raises(ConfigError, match=r"hsx stats .* --points mlp_out --layers 3"):
        TokenBatches(HiddenStatesDataset(run, points=["mlp_out"], layers=[3]), 8, scaling="norm")
    run.store.put("statistics/q-0003.json", [b"{"])
    assert [problem.part for problem in verify_run(run.place.root).problems] == ["statistics/q-0003.json"]


@pytest.mark.parametrize("codec", ["none", "split", "fp8-token"])
def test_a_run_of_points_is_verified(codec: str) -> None:
    store = MemoryStore()
    made = point_sample("a", hidden=True)
    run = run_of(made.segments(0, CUTS), codec=codec, store=store)
    report = verify_run(store)
    assert report.problems == []
    assert (report.parts, report.samples) == (1, 1)
    (name,) = run.index.parts_in_use()
    data = bytearray(store.objects[name])
    found = []
    for at in range(len(data) - 2000, len(data), 97):
        store.objects[name] = bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :])
        found.append(verify_run(store).ok)
    assert not any(found)


def test_ids_that_cannot_be_decoded_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt has the part's checksum. The checksums of chunks are checked, too."""

    def build(segments: Sequence[EncodedSegment], *rest: Any) -> EncodedPart:
        wrong = [
            replace(s, info=replace(s.info, crcs=tuple(tuple(c ^ 1 for c in layer) for layer in s.info.crcs or ())))
            if s.info.dtype == "int32"
            else s
            for s in segments
        ]
        return build_part(wrong, *rest)

    monkeypatch.setattr(runs, "build_part", build)
    store = MemoryStore()
    run_of(point_sample("a").segments(0), store=store)
    (problem,) = verify_run(store).problems
    assert "segment 3, layer 3" in problem.message


def test_columns_of_zeros_expand_no_further_into_carriers_than_into_states() -> None:
    """``hsx cat`` writes carriers."""
    store = MemoryStore()
    write_v1_run(store, {"meaning": {}, "settings": {}})
    made = RandomSample("a", np.zeros((64, 1, 1 << 14), np.uint16), np.arange(64), (3,), "bfloat16", 64)
    facts = {"point": "q", "shards": 64, "columns": 64, "sample_hash": token_hash(made.token_ids)}
    columns = [(made, replace(made.segments()[0], **facts, shard=i, column=i), 0) for i in range(64)]
    RunWriter(store, ZstdCodec()).put(columns)
    sample = Run(store)["a"]
    for read in (lambda: sample.load(points=["q"]), lambda: sample.load_carrier(point="q")):
        with pytest.raises(FormatError, match="at most 64 times"):
            read()


def test_an_answer_builds_the_mapping_of_points_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = point_sample("a")
    sample = run_of(made.segments(0), made.segments(1))["a"]
    found, built = sample.points, list[object]()
    monkeypatch.setattr(Sample, "points", property(lambda _: built.append(0) or found))
    file = StatesFile(sample, Range())
    assert len(file.layer_ids) == len(found) > 1
    assert len(built) == 1
