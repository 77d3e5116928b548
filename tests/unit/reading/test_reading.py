"""Runs and samples, written by the real encoder, with real receipts, into a real folder."""

from __future__ import annotations

import fcntl
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hsx_dist.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    NotFound,
    RunError,
    SampleFailed,
    SampleNotFound,
)
from hsx_dist.format.codecs import Codec, Fp8TokenCodec, NoneCodec, SplitCodec
from hsx_dist.format.container import SegmentEncoder, build_part
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.runs import take_attempt
from hsx_dist.reading import Run, load_hidden_states, open_run, verify_run
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, unsealed, whole, write_v1_run

LONG = random_sample("long", 100, seed=1)
SHORT = random_sample("short/é", 5, seed=2)
OTHER = random_sample("other", 33, seed=3)
REFUSED = RowFate("empty", 3, "refused", "no text", 0)
FAILED = RowFate("unlucky", 4, "failed", "the replica died", 3)


def write(store: Store, *, codec: Codec | None = None) -> RunWriter:
    """``LONG`` in three segments over two parts, not in order."""
    write_v1_run(store, {"meaning": {"model": "tiny"}})
    writer = RunWriter(store, codec)
    a, b, c = LONG.segments(20, 70)
    writer.put([(LONG, c, 1), whole(SHORT, 2), (LONG, a, 1)])
    writer.put([(LONG, b, 1), whole(OTHER, 0)], [REFUSED, FAILED])
    return writer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def bits(states: Any) -> np.ndarray[Any, Any]:
    return states.contiguous().view(torch.uint16).numpy()


@pytest.mark.parametrize("codec", [SplitCodec(), NoneCodec()], ids=lambda c: c.name)
def test_a_run_gives_back_its_samples(store: Store, codec: Codec) -> None:
    write(store, codec=codec)
    run = open_run(store.url)
    assert run.info["meaning"] == {"model": "tiny"}
    assert len(run) == 3
    assert [s.key for s in run] == ["other", "long", "short/é"] == list(run.keys())  # rows 0, 1, 2
    assert "long" in run
    assert "empty" not in run
    assert (dict(run.refused), dict(run.failed)) == ({"empty": REFUSED}, {"unlucky": FAILED})
    for sample in (LONG, SHORT, OTHER):
        got = run[sample.key]
        assert (got.num_tokens, got.dtype, got.layer_ids) == (len(sample.token_ids), "bfloat16", (2, 15, 30))
        assert (got.hidden_size, got.about) == (24, {"model": "tiny"})
        loaded = got.load()
        assert loaded["key"] == sample.key
        assert loaded["hidden_states"].dtype == torch.bfloat16
        assert loaded["hidden_states"].is_contiguous()
        assert np.array_equal(bits(loaded["hidden_states"]), sample.states)
        assert torch.equal(loaded["token_ids"], torch.from_numpy(sample.token_ids))
        assert torch.equal(loaded["layer_ids"], torch.tensor([2, 15, 30]))
        assert torch.equal(got.token_ids(), loaded["token_ids"])
        assert np.array_equal(bits(got.layer(15)), sample.states[:, 1])
        again = load_hidden_states(store.url, sample.key, layers=[30, 2], tokens=(-4, 100))
        assert np.array_equal(bits(again["hidden_states"]), sample.states[-4:, [2, 0]])
        assert np.array_equal(again["layer_ids"].numpy(), [30, 2])
    assert run["long"].uri.count("data/part-") == 2
    assert run["short/é"].uri == f"{run.url}/{run['short/é'].uri.removeprefix(run.url + '/')}"


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 99), max_size=5),
    start=st.integers(-120, 120) | st.none(),
    stop=st.integers(-120, 120) | st.none(),
    layers=st.lists(st.sampled_from([2, 15, 30]), max_size=4) | st.none(),
    parts=st.integers(1, 3),
)
def test_any_window_of_a_sample_in_any_segments(
    cuts: set[int], start: int | None, stop: int | None, layers: list[int] | None, parts: int
) -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    segments = LONG.segments(*sorted(cuts))
    for i in range(min(parts, len(segments))):
        writer.put([(LONG, s, None) for s in reversed(segments[i::parts])])
    loaded = Run(store)["long"].load(layers, slice(start, stop), "numpy")
    columns = [0, 1, 2] if layers is None else [(2, 15, 30).index(k) for k in layers]
    expected = LONG.states[start:stop][:, columns].astype(np.uint32) << 16
    assert np.array_equal(loaded["hidden_states"].view(np.uint32), expected)
    assert np.array_equal(loaded["token_ids"], LONG.token_ids[start:stop])


def test_only_the_segments_of_the_window_are_fetched() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    sample = random_sample("a", 4000, hidden_size=256, chunk_tokens=500)
    writer = RunWriter(store)
    for segment in sample.segments(1000, 2000, 3000):
        writer.put([(sample, segment, None)])
    run = Run(store)
    run["a"].load()
    store.reset()
    states = run["a"].load([15], (1400, 1600))["hidden_states"]
    assert np.array_equal(bits(states), sample.states[1400:1600, [1]])
    one_layer = 1000 * 256 * 2
    assert store.bytes_read <= one_layer + 8 * 1000
    store.reset()
    assert run["a"].load([15], (7, 7))["hidden_states"].shape == (0, 1, 256)
    assert store.bytes_read <= 8 * 1000


def test_frameworks_and_dtypes() -> None:
    for dtype, numpy_dtype in (("bfloat16", np.float32), ("float16", np.float16), ("float32", np.float32)):
        store = MemoryStore()
        write_v1_run(store, {})
        sample = random_sample("a", 20, dtype=dtype)
        RunWriter(store).put([whole(sample)])
        got = Run(store)["a"]
        as_torch, as_numpy = got.load(framework="torch"), got.load(framework="numpy")
        assert as_torch["hidden_states"].dtype == getattr(torch, dtype)
        assert as_numpy["hidden_states"].dtype == numpy_dtype
        assert (as_numpy["token_ids"].dtype, as_numpy["layer_ids"].dtype) == (np.int64, np.int64)
        wide = as_torch["hidden_states"].float().numpy()
        assert np.array_equal(wide, as_numpy["hidden_states"].astype(np.float32), equal_nan=True)
        with pytest.raises(ConfigError, match="framework"):
            got.load(framework="jax")  # type: ignore[arg-type]


def test_reading_imports_neither_torch_nor_ray_nor_vllm(store: Store) -> None:
    write(store)
    code = (
        "import sys, hsx_dist; run = hsx_dist.open_run(sys.argv[1]); "
        "print(run['long'].load(framework='numpy')['hidden_states'].shape); "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, store.url], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == ["(100, 3, 24)", "[]"]


def test_missing_runs_samples_and_layers_raise(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.json"):
        open_run(store.url)
    writer = write(store)
    run = open_run(store.url)
    assert not run.complete
    for key, reason in (("empty", "no text"), ("unlucky", "replica died"), ("absent", "is not complete")):
        with pytest.raises(SampleNotFound, match=reason):
            run[key]
    writer.complete()
    run.refresh()
    assert run.complete
    assert len(run) == 3
    with pytest.raises(SampleNotFound, match="the run is complete with 3 samples"):
        run["absent"]
    with pytest.raises(ConfigError, match="2, 15, 30"):
        run["long"].load([3])
    with pytest.raises(ConfigError, match="step"):
        run["long"].load(tokens=slice(0, 10, 2))
    with pytest.raises(ConfigError, match="key"):
        load_hidden_states(store.url)
    for name in ("..", ".", "a\0.safetensors", ".hsx-unfinished-1.safetensors"):
        for url in (store.url, "memory://place"):
            with pytest.raises(ConfigError, match=r"path or URL of an object, got .*Check its last part"):
                load_hidden_states(f"{url}/{name}", "long" if name.endswith("s") else None)
    with pytest.raises(SampleFailed, match="replica died"):
        load_hidden_states(store.url, "unlucky")
    with pytest.raises(SampleFailed, match="no text"):
        load_hidden_states(store.url, "empty", wait=60)
    with pytest.raises(NotFound):
        load_hidden_states(str(tmp_path / "nowhere"), "a")
    take_attempt(store, {})
    run.refresh()
    assert not run.complete


def test_a_newer_attempt_wins_and_half_a_sample_is_none(store: Store) -> None:
    write(store)
    newer = random_sample("other", 12, seed=9)
    half = random_sample("half", 30)
    writer = RunWriter(store, NoneCodec(), "v")
    writer.put([whole(newer), (half, half.segments(10)[1], None)])
    run = open_run(store.url)
    assert np.array_equal(bits(run["other"].load()["hidden_states"]), newer.states)
    with pytest.raises(SampleNotFound):
        run["half"]


def test_waiting_for_a_sample(store: Store) -> None:
    def later() -> None:
        time.sleep(0.2)
        write_v1_run(store, {})
        time.sleep(0.2)
        RunWriter(store).put([whole(LONG)])

    thread = threading.Thread(target=later)
    thread.start()
    loaded = load_hidden_states(store.url, "long", wait=30)
    thread.join()
    assert np.array_equal(bits(loaded["hidden_states"]), LONG.states)
    started = time.monotonic()
    with pytest.raises(SampleNotFound):
        load_hidden_states(store.url, "never", wait=0.3)
    assert 0.3 <= time.monotonic() - started < 30


# -- one object ------------------------------------------------------------------------------------------------------


def put_object(
    store: Store, name: str, *samples: RandomSample, codec: Codec | None = None, about: Mapping[str, Any] | None = None
) -> str:
    codec = codec or NoneCodec()
    encoded = []
    for sample in samples:
        encoder = SegmentEncoder(codec)
        for page in sample.pages():
            encoder.add(page)
        encoded.append(encoder.finish())
    store.put(name, build_part(encoded, codec, about or {}).buffers)
    return f"{store.url}/{name}"


@pytest.mark.parametrize("codec", [SplitCodec(), NoneCodec()], ids=lambda c: c.name)
def test_one_object_is_loaded_by_its_path(store: Store, codec: Codec) -> None:
    path = put_object(store, "a.safetensors", LONG, codec=codec)
    for key in (None, "long"):
        loaded = load_hidden_states(path, key, layers=[15])
        assert loaded["key"] == "long"
        assert np.array_equal(bits(loaded["hidden_states"]), LONG.states[:, [1]])
    with pytest.raises(SampleNotFound, match="'b'"):
        load_hidden_states(path, "b")
    several = put_object(store, "two.safetensors", LONG, SHORT, codec=codec)
    assert np.array_equal(bits(load_hidden_states(several, "short/é")["hidden_states"]), SHORT.states)
    with pytest.raises(ConfigError, match="'long'"):
        load_hidden_states(several)


def test_a_piece_of_a_sample_is_not_loaded_as_the_sample(store: Store) -> None:
    write(store)
    part = next(o.name for o in store.list("data/"))
    assert load_hidden_states(f"{store.url}/{part}", "short/é")["key"] == "short/é"
    with pytest.raises(SampleNotFound, match="piece"):
        load_hidden_states(f"{store.url}/{part}", "long")


def test_a_file_of_vllms_own_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, ids = torch.randn(9, 2, 8).bfloat16(), torch.arange(9)
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "req-1.safetensors")
    loaded = load_hidden_states(str(tmp_path / "req-1.safetensors"), tokens=(3, -1))
    assert torch.equal(loaded["hidden_states"], states[3:-1])
    assert torch.equal(loaded["token_ids"], ids[3:-1])
    assert loaded["layer_ids"].shape == (0,)
    assert loaded["key"] == "req-1"
    monkeypatch.chdir(tmp_path)
    assert torch.equal(load_hidden_states("req-1.safetensors")["hidden_states"], states)


def test_a_failure_marker_ends_the_wait(store: Store) -> None:
    path = f"{store.url}/a.safetensors"
    with pytest.raises(NotFound):
        load_hidden_states(path)
    store.put("a.error.json", [json.dumps({"key": "a", "error": "the request was aborted"}).encode()])
    with pytest.raises(SampleFailed, match="aborted"):
        load_hidden_states(path, wait=60)
    store.put("a.error.json", [b"{\xff"])
    with pytest.raises(SampleFailed, match=r"a\.error\.json"):
        load_hidden_states(path, wait=60)


def test_an_object_of_any_name_is_loaded_by_its_path(store: Store) -> None:
    for name in ("foo", "sub/x.bin"):
        path = put_object(store, name, LONG)
        assert np.array_equal(bits(load_hidden_states(path)["hidden_states"]), LONG.states)
    store.put("sub/x.bin.failed.json", [json.dumps({"error": "its client went"}).encode()])
    with pytest.raises(SampleFailed, match="went"):
        load_hidden_states(path)
    with pytest.raises(NotFound):
        load_hidden_states(f"{store.url}/nothing")
    for folder in (f"{store.url}/", "s3://bucket"):
        with pytest.raises(ConfigError, match="key"):
            load_hidden_states(folder)


def test_an_object_whose_lock_is_held_is_waited_for(store: Store) -> None:
    path = put_object(store, "a.safetensors", LONG)
    Path(f"{path}.lock").touch()
    load_hidden_states(path)
    with Path(f"{path}.lock").open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(NotFound, match=r"a\.safetensors\.lock"):
            load_hidden_states(path)
        threading.Timer(0.2, writer.close).start()
        assert load_hidden_states(path, wait=30)["key"] == "long"


# -- damage ----------------------------------------------------------------------------------------------------------


def test_verify_passes_a_sound_run(store: Store) -> None:
    writer = write(store)
    seen: list[str] = []
    for _ in range(2):  # before and after the run is complete
        report = verify_run(store, on_part=lambda part, _: seen.append(part))
        assert report.ok, report.problems
        assert (report.parts, report.samples) == (2, 3)
        assert report.bytes == sum(o.size for o in store.list("data/"))
        writer.complete()
    assert sorted(set(seen)) == [o.name for o in store.list("data/")]


def test_verify_counts_non_finite_and_empty_layers() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    for dtype, infinity in (("bfloat16", 0x7F80), ("float16", 0xFC00), ("float32", 0x7F800000)):
        sample = random_sample(f"a-{dtype}", 40, dtype=dtype)
        sample.states[:] = 1
        sample.states[39, 1, 5] = infinity
        sample.states[:, 2] = 0
        sample.states[0, 2, 0] = 1 << (8 * sample.states.itemsize - 1)  # -0
        RunWriter(store).put([whole(sample)])
    report = verify_run(store)
    assert report.ok
    assert (report.non_finite, report.all_zero) == (3, 3)
    assert report.bad_samples == ["a-bfloat16", "a-float16", "a-float32"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", [SplitCodec(), NoneCodec()], ids=lambda c: c.name)
def test_any_flipped_bit_of_a_part_is_found_by_verify(codec: Codec) -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    receipt = RunWriter(store, codec).put([whole(random_sample("a", 9)), whole(random_sample("b", 4))])
    assert receipt.part is not None
    data = store.objects[receipt.part]
    for bit in np.random.default_rng(0).integers(0, 8 * len(data), 200):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        store.objects[receipt.part] = bytes(broken)
        problems = verify_run(store).problems
        assert {p.part for p in problems} == {receipt.part}
        assert any("crc32c" in p.message for p in problems)


def test_verify_names_missing_and_swapped_parts(store: Store) -> None:
    writer = write(store)
    writer.complete()
    first, second = (o.name for o in store.list("data/"))
    whole_part = store.get(first)
    store.put(first, [whole_part[:-1]])
    assert {p.part for p in verify_run(store).problems} == {first}
    store.put(first, [store.get(second)])
    assert {p.part for p in verify_run(store).problems} == {first}
    with pytest.raises(FormatError, match=r"part-"):
        open_run(store.url)["long"].load()
    store.delete(first)
    (problem,) = verify_run(store).problems
    assert problem.part == first
    store.put(first, [whole_part])
    assert verify_run(store).ok
    complete = unsealed(store.get("attempts/0001.complete.json"))
    complete["counts"]["samples"] = 4
    store.put("attempts/0001.complete.json", [json.dumps(complete).encode()])
    (problem,) = verify_run(store).problems
    assert problem.part == ""
    assert "samples" in problem.message
    store.delete("manifest/compacted-0001.jsonl.zst")
    assert not verify_run(store).ok


def test_a_part_that_is_sound_but_not_the_proven_one_is_refused() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    receipt = writer.put([whole(random_sample("a", 9, seed=1))])
    assert receipt.part is not None
    other = random_sample("a", 9, seed=2)
    store.objects[receipt.part] = content_of(other)
    with pytest.raises(FormatError):
        Run(store)["a"].load()
    # Sound, and with equal sizes: only the hash of the token ids differs.
    for more in range(1, 100):
        sample = random_sample("a", 9, seed=1)
        sample.token_ids[3] += more
        part = content_of(sample)
        if len(part) == receipt.size:
            break
    store.objects[receipt.part] = part
    for read in (Run(store)["a"].token_ids, Run(store)["a"].load):
        with pytest.raises(IntegrityError, match="hash"):
            read()
    assert any("hash" in p.message for p in verify_run(store).problems)


def content_of(sample: RandomSample) -> bytes:
    store = MemoryStore()
    put_object(store, "x", sample, codec=SplitCodec(), about={"model": "tiny"})
    return store.objects["x"]


def test_samples_give_attached_arrays_and_the_loss_of_the_codec() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store, Fp8TokenCodec(), attached={"loss_mask": np.arange(100) > 50})
    sample = random_sample("long", 100, seed=1, odd=False)
    a, b = sample.segments(40)
    writer.put([(sample, b, 1)])
    writer.put([(sample, a, 1)])
    got = Run(store)["long"]
    assert got.attached()["loss_mask"].sum() == 49
    assert set(got.loss) == set(sample.layer_ids)
    lossy, exact = got.load()["hidden_states"].double(), torch.from_numpy(sample.states).view(torch.bfloat16).double()
    for k, layer in enumerate(sample.layer_ids):
        error = float((lossy - exact)[:, k].norm() / exact[:, k].norm())
        assert 0 < error <= got.loss[layer].rms * 1.001 <= got.loss[layer].worst_token * 1.002
    assert not Run(write(MemoryStore()).store)["long"].loss
    assert not Run(write(MemoryStore()).store)["long"].attached()


def test_verify_reads_the_receipts_behind_a_compacted_manifest_too(store: Store) -> None:
    write(store).complete()
    assert verify_run(store).ok
    names = [i.name for i in store.list("manifest/") if i.name.endswith(".json")]
    body = store.get(names[0])
    store.put(names[0], [body[: len(body) // 2]])
    store.delete(names[1])
    assert {p.part for p in verify_run(store).problems} == set(names[:2])


def test_a_run_is_opened_again_in_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ray's workers, which have their own."""
    (tmp_path / "other").mkdir()
    store_run(open_store(str(tmp_path / "run")), [random_sample("k", 9)])
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(open_run("run"))
    monkeypatch.chdir(tmp_path / "other")
    assert pickle.loads(sent)["k"].load(framework="numpy")["hidden_states"].shape[0] == 9
    (tmp_path / "other").rmdir()
    assert open_run(str(tmp_path / "run")).keys() == ["k"]  # without a working folder
