"""``hsx cat``, ``export``, ``gc``, ``rm``, ``verify`` and the full ``show``, on runs stored by the real writer."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsx_dist import HiddenStatesMapDataset, open_run
from hsx_dist.cli import inspect, main
from hsx_dist.cli.cat import run_cat
from hsx_dist.cli.inspect import _layer_norms
from hsx_dist.errors import FormatError, RunError
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.names import receipt_name
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import beat, load_manifest, take_attempt, write_complete
from hsx_dist.page import token_hash
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.garbage import remove_run
from hsx_dist.reading.liveness import require_dead
from hsx_dist.reading.missing import mark_of, removal_mark
from hsx_dist.reading.sample import columns_of
from hsx_dist.reading.statistics import compute_statistics, store_statistics
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole, write_v1_run

SAMPLES = [random_sample(f"s{i}", 9 + i, seed=i, odd=False) for i in range(6)]


def mask_of(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss_mask": np.arange(len(sample.token_ids)) > 2}


def own(root: Store) -> Store:
    """The store of a run's objects."""
    return open_place(root).store


def names(store: Store) -> set[str]:
    return {info.name for info in store.list()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "run"))
    store_run(made, SAMPLES, per_part=2, attached=mask_of, about={"num_hidden_layers": 30})
    return made


def hsx(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(args)
    return int(e.value.code or 0)


def test_show_reads_the_layers_of_a_small_sample_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One load per layer, each of which reads thousands of layers, would take minutes."""
    layers = tuple(range(500))
    made = MemoryStore()
    store_run(made, [random_sample("a", 9, layer_ids=layers, hidden_size=4, odd=False)], codec=NoneCodec())
    sample = Run(made)["a"]
    loads: list[Any] = []
    load = Sample.load_carrier
    monkeypatch.setattr(Sample, "load_carrier", lambda *a, **k: loads.append(a[1]) or load(*a, **k))
    norms = _layer_norms(sample, "hidden_states", columns_of(sample)["hidden_states"])
    assert loads == [layers]
    states = sample.load(framework="numpy")["hidden_states"].astype(np.float64)
    assert [n["layer"] for n in norms] == list(layers)
    assert norms[77]["max_norm"] == np.linalg.norm(states[:, 77], axis=1).max()
    monkeypatch.setattr(inspect, "_BYTES_AT_ONCE", (9 * 4 * 2 + 4 * 8) * 200)
    assert _layer_norms(sample, "hidden_states", columns_of(sample)["hidden_states"]) == norms
    assert [len(some) for some in loads] == [500, 200, 200, 100]


def test_cat_writes_the_chosen_layers_and_tokens(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    assert hsx("cat", store.url, "s3", "-o", str(out), "--layers", "30,2", "--tokens", "1:-2") == 0
    got = np.load(out)
    expected = SAMPLES[3].states[1:-2][:, [2, 0]].astype(np.uint32) << 16
    assert np.array_equal(got["hidden_states"], expected.view(np.float32))
    assert got["layer_ids"].tolist() == [30, 2]
    assert np.array_equal(got["token_ids"], SAMPLES[3].token_ids[1:-2])
    assert np.array_equal(got["loss_mask"], mask_of(SAMPLES[3])["loss_mask"][1:-2])
    out = tmp_path / "a.safetensors"
    assert hsx("cat", store.url, "s3", "-o", str(out)) == 0
    tensors = load_file(out)
    assert np.array_equal(tensors["hidden_states"].view(dtype=torch.uint16).numpy(), SAMPLES[3].states)
    assert tensors["loss_mask"].sum() == 9
    out = tmp_path / "a.npy"
    assert hsx("cat", store.url, "s3", "-o", str(out), "--tokens=-1:") == 0
    assert np.load(out).shape == (1, 3, 24)
    for wrong in (
        ["-o", "x.txt"],
        ["-o", str(tmp_path / "no" / "x.npz")],
        ["-o", str(out), "--tokens", "3"],
        ["-o", str(out), "--layers", "a"],
    ):
        assert hsx("cat", store.url, "s3", *wrong) == 2


def test_an_attached_name_replaces_nothing_that_a_sample_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers refuse the first six names now. Parts with such names stay readable."""
    names = ("hidden_states", "token_ids", "layer_ids", "input_ids", "key", "meta")
    names += ("file", "allow_pickle", "__metadata__", "label")
    monkeypatch.setattr("hsx_dist.format.container_write.RESERVED_NAMES", frozenset())
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES, attached={name: np.full(2, 7, np.int32) for name in names})
    sample = SAMPLES[3]
    for out in (tmp_path / "a.npz", tmp_path / "a.safetensors"):
        assert hsx("cat", store.url, "s3", "-o", str(out)) == 0
        got = dict(np.load(out)) if out.suffix == ".npz" else load_file(out)
        assert got["token_ids"].tolist() == sample.token_ids.tolist()
        assert got["layer_ids"].tolist() == list(sample.layer_ids)
        assert got["hidden_states"].shape == sample.states.shape
        assert {name for name in got if got[name].shape == (2,)} == {"label", *(f"attached.{n}" for n in names[:-1])}
    loaded = open_run(store.url)["s3"].load(framework="numpy")
    assert loaded["token_ids"].tolist() == sample.token_ids.tolist()
    (first, *_) = HiddenStatesMapDataset(store.url, framework="numpy")
    assert first["input_ids"].tolist() == SAMPLES[0].token_ids.tolist()
    assert first["key"] == "s0"


def test_a_mask_of_another_length_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES, attached=mask_of)
    attached = Sample.attached
    monkeypatch.setattr(Sample, "attached", lambda self: {**attached(self), "loss_mask": np.float64(1)})
    with pytest.raises(FormatError, match=r"expected a loss mask of 12 tokens for 's3', got shape \(\)"):
        run_cat(store.url, "s3", str(tmp_path / "a.npz"), (), layers=None, tokens=None)


def test_show_lists_outlier_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = random_sample("a", 20, dtype="float32", odd=False)
    values = np.full(sample.states.shape, 0.5, np.float32)
    values[:, 1, 7] = 50
    made = RandomSample("a", values.view(np.uint32), sample.token_ids, sample.layer_ids, "float32", 16)
    store_run(open_store(str(tmp_path / "run")), [made])
    assert hsx("show", str(tmp_path / "run"), "a", "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["outliers"] for layer in layers] == [[], [{"channel": 7, "times": 100.0}], []]
    assert hsx("show", str(tmp_path / "run"), "a") == 0
    assert "7 (100x)" in capsys.readouterr().out


def test_statistics_of_many_points_need_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each point reads the samples again, so the time is quadratic in the points."""
    sample = random_sample("a", 1, layer_ids=(1,), hidden_size=1, odd=False)
    made = open_store(str(tmp_path / "run"))
    write_v1_run(made, {"meaning": {"layers": []}, "settings": {}})
    facts = {"shards": 1, "columns": 65, "sample_hash": token_hash(sample.token_ids)}
    first = sample.segments()[0]
    RunWriter(made).put([(sample, replace(first, point=f"p{i}", column=i, **facts), 0) for i in range(65)])
    assert hsx("stats", made.url) == 2
    assert "expected at most 64 points, got 65. Name some (--points)" in capsys.readouterr().err
    assert hsx("stats", made.url, "--points", "p1,p64") == 0


def test_show_prints_the_tokens_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    sample = random_sample("a", 2)
    made = RandomSample("a", sample.states, np.array([0, 1]), sample.layer_ids, sample.dtype, 16)
    store_run(open_store(str(tmp_path / "run")), [made], info={"meaning": {"model": str(folder)}})
    assert hsx("show", str(tmp_path / "run"), "a", "--json", "--tokenizer", str(folder)) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "hello world"


def test_export_from_the_shell(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("export", store.url, str(tmp_path / "out"), "--to", "vllm", "--shard", "0/2", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["written"], said["finished"]) == (3, False)
    assert hsx("export", store.url, str(tmp_path / "out"), "--to", "vllm") == 0
    assert "3 files written, 3 existed before; complete" in capsys.readouterr().out
    assert hsx("export", store.url, str(tmp_path / "x"), "--to", "specforge-eagle3") == 2
    assert "without [27]" in capsys.readouterr().err
    assert hsx("export", store.url, str(tmp_path / "x"), "--to", "vllm", "--shard", "a") == 2


def test_gc_removes_only_parts_without_a_receipt(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run = own(store)
    before = names(run)
    garbage = ["data/part-0001-dead-11111111-000001.safetensors", "data/part-0002-later-000001.safetensors"]
    for name in (*garbage, "data/notes.txt"):
        run.put(name, [b"x" * 100])
    store.put("other/part.safetensors", [b"x"])
    # Removes neither another run nor unrelated files.
    others = ["run-20261123/run.json", "run-0123456789abcdef/attempts/0001.json", "manifest/train.csv"]
    for name in others:
        store.put(name, [b"x"])
    assert hsx("gc", store.url, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": store.url,
        "deleted": False,
        "garbage": garbage,
        "bytes": 200,
        "removed_runs": [],
        "unfinished": [],
    }
    assert names(run) == before | set(garbage) | {"data/notes.txt"}
    assert hsx("gc", store.url, "--delete") == 0
    seals = {receipt_name(1, "dead-11111111", 1), receipt_name(2, "later", 1)}
    assert names(run) == before | {"data/notes.txt"} | seals
    assert "other/part.safetensors" in names(store)
    assert names(store).issuperset(others)
    assert hsx("verify", store.url) == 0


def test_gc_keeps_a_part_that_only_a_single_receipt_names(tmp_path: Path) -> None:
    """A late writer of version 1 stored it after the run was complete, so the compacted manifest lacks it."""
    store = open_store(str(tmp_path / "run"))
    write_v1_run(store, {"meaning": {"model": "m"}})
    writer = RunWriter(store)
    writer.put([whole(SAMPLES[0])])
    write_complete(store, 1, load_manifest(store), {})
    late = writer.put([whole(SAMPLES[1])])
    assert hsx("gc", store.url, "--delete") == 0
    assert late.part in names(store)


def test_nothing_is_removed_while_an_attempt_is_alive(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own(store)
    attempt = take_attempt(run, {})
    run.put("data/part-0001-dead-000001.safetensors", [b"x"])
    beat(run, attempt, 1, "running")
    beats = iter(range(2, 100))

    def asleep(_: float) -> None:
        beat(run, attempt, next(beats), "running")

    before = names(store)
    monkeypatch.setattr("hsx_dist.cli.gc.require_dead", lambda s, **_: require_dead(s, sleep=asleep))
    for command in (["gc", store.url, "--delete"], ["rm", store.url, "--yes"]):
        assert hsx(*command) == 2
        assert "is alive" in capsys.readouterr().err
    assert names(store) == before
    beat(run, attempt, 1000, "stopped")
    assert hsx("gc", store.url, "--delete") == 0
    assert "data/part-0001-dead-000001.safetensors" not in names(run)


def test_a_silent_attempt_is_dead_after_a_while(store: Store) -> None:
    run = own(store)
    take_attempt(run, {})
    run.put("data/part-0002-dead-000001.safetensors", [b"x"])
    assert hsx("gc", store.url, "--delete", "--watch", "0.1") == 0
    assert "data/part-0002-dead-000001.safetensors" not in names(run)


def test_gc_removes_files_that_were_never_finished(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_place(store).folder
    left = sorted([".hsx-unfinished-0123", *(f"{folder}/{sub}.hsx-unfinished-0123" for sub in ("data/", "manifest/"))])
    for name in left:
        Path(store.url, name).write_bytes(b"half")
    assert hsx("gc", store.url) == 0
    said = capsys.readouterr().out
    assert f"never finished {folder}/data/.hsx-unfinished-0123" in said
    assert "3 files that were never finished (12 B). --delete removes them" in said
    assert hsx("gc", store.url, "--delete", "--json") == 0
    assert sorted(json.loads(capsys.readouterr().out)["unfinished"]) == left
    assert not any(Path(store.url, name).exists() for name in left)
    assert hsx("verify", store.url) == 0


def test_gc_finishes_what_a_consumer_marked_and_did_not_delete(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own(store)
    part = min(info.name for info in run.list("data/"))
    run.put(removal_mark(part), [b"{}"])
    assert hsx("gc", store.url) == 0
    listed = capsys.readouterr().out
    assert f"no reader needs {part}" in listed
    assert "without a receipt" not in listed  # a receipt names it
    assert hsx("gc", store.url, "--delete") == 0
    assert part not in names(run)
    assert hsx("verify", store.url) == 0


def test_rm_removes_the_run_and_nothing_else(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("mine.txt", [b"x"])
    unfinished = Path(own(store).url, "data/.hsx-unfinished-0123")
    unfinished.write_bytes(b"half")
    assert hsx("rm", store.url) == 0
    assert "6 samples in 3 parts" in capsys.readouterr().out
    assert len(open_run(store.url)) == 6
    assert hsx("rm", store.url, "--yes") == 0
    assert names(store) == {"mine.txt", "run.json"}
    assert not unfinished.exists()
    assert "mine.txt" in capsys.readouterr().out
    assert hsx("rm", store.url, "--yes") == 2
    assert hsx("ls", store.url) == 2
    assert "the tombstone of a run removed at" in capsys.readouterr().err
    store_run(store, SAMPLES[:2])
    assert len(open_run(store.url)) == 2


@pytest.mark.parametrize("interrupted", [False, True])
def test_rm_of_a_run_of_version_1_leaves_other_files_in_its_folders(tmp_path: Path, interrupted: bool) -> None:
    root = open_store(str(tmp_path / "old"))
    store_run(root, SAMPLES, version=1)
    part = "data/part-0001-w-000001.safetensors"
    root.put("consumed/part-0001-w-000001.safetensors/train.json", [mark_of(part)])
    run = open_run(root.url)
    store_statistics(run, compute_statistics(run, [SAMPLES[0].layer_ids[0]]))
    stored = {"check.json": ("attempt", "wanted", "samples", "dtype", "passed", "layers")}
    stored["complete.json"] = ("format", "attempt", "created", "manifest", "counts", "summary")
    for name, members in stored.items():
        root.put(name, [json.dumps(dict.fromkeys(members)).encode()])
    unfinished = tmp_path / "old" / "data" / ".hsx-unfinished-0123"
    unfinished.write_bytes(b"half")
    mine = {"data/train.jsonl", "data/parts/part-1.txt", "report/thesis.tex", "manifest/index.html", "attempts/1.json"}
    mine |= {"statistics/2024.json", "attempts/0007.json", "attempts/0008.closed.json"}
    mine |= {"consumed/part-x.safetensors/a.json"}
    for name in mine:
        root.put(name, [b'{"part": "of another program", "by": "me"}'])
    of_another_run = tmp_path / "old" / "data" / "run" / ".hsx-unfinished-0123"
    of_another_run.parent.mkdir()
    of_another_run.touch()

    class Killed(Exception):
        pass

    def kill(name: str) -> None:
        if interrupted and name.startswith("data/"):
            raise Killed

    with suppress(Killed):
        remove_run(root, open_place(root), on_object=kill)
    assert hsx("rm", root.url, "--yes", "--watch", "0") == (0 if interrupted else 2)
    assert names(root) == mine | {"run.json"}
    assert of_another_run.exists()
    assert not unfinished.exists()


@pytest.mark.parametrize("version", [1, 2])
def test_rm_and_gc_delete_no_files_of_another_program_with_a_runs_names(
    tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = open_store(str(tmp_path))
    mine = {"check.json", "statistics/2024.json", "attempts/0001.json"}

    def write_mine() -> None:
        for name in mine:
            root.put(name, [b'{"mine": true}'])

    write_mine()
    assert hsx("rm", root.url, "--yes") == 2
    for name in mine:
        root.delete(name)
    store_run(root, SAMPLES, version=version)
    if version == 2:
        write_mine()
    assert hsx("rm", root.url, "--yes") == 0
    write_mine()
    assert hsx("rm", root.url, "--yes") == 2
    store_run(root, SAMPLES)
    (left,) = {name for name in names(root) if name.startswith("run.")} - {"run.json"}
    assert hsx("gc", root.url, "--delete") == 0
    assert hsx("rm", root.url, "--yes") == 0
    assert names(root) == mine | {"run.json", left}
    assert "objects that do not belong to the run stay, such as attempts/0001.json" in capsys.readouterr().out


def test_an_interrupted_rm_can_be_repeated(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    class Killed(Exception):
        pass

    def kill(name: str) -> None:
        raise Killed

    with pytest.raises(Killed):
        remove_run(store, open_place(store), on_object=kill)
    with pytest.raises(RunError, match="hsx rm"):
        store_run(store, SAMPLES)
    assert hsx("gc", store.url, "--delete") == 2
    assert hsx("rm", store.url, "--watch", "0") == 0
    shown = capsys.readouterr().out
    assert {name for name in names(store) if name in shown} == names(store) - {"run.json"}
    assert hsx("rm", store.url, "--yes", "--watch", "0") == 0
    assert names(store) == {"run.json"}
    store_run(store, SAMPLES)


def test_rm_removes_a_version_1_run_without_a_description(tmp_path: Path) -> None:
    root = open_store(str(tmp_path / "old"))
    for name in ("manifest/0001/w/000001.json", "data/part-0001-w-000001.safetensors", "data/mine.txt"):
        root.put(name, [b"x"])
    with pytest.raises(RunError, match="hsx rm"):
        store_run(root, SAMPLES)
    assert hsx("rm", root.url, "--yes") == 0
    assert names(root) == {"data/mine.txt", "run.json"}
    store_run(root, SAMPLES)


def test_verify_checks_a_sample_of_parts_and_resumes(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = str(tmp_path / "sound.jsonl")

    def verify(*args: str, status: int = 0) -> Any:
        assert hsx("verify", store.url, "--json", *args) == status
        return json.loads(capsys.readouterr().out)

    assert verify("--sample", "0.34", "--seed", "1")["parts"] < 3
    assert verify("--resume", notes)["known"] == 0
    with Path(notes).open("a") as f:
        f.write('{"part": "torn')
    run = own(store)
    name = sorted(i.name for i in run.list("data/"))[0]
    damaged = bytearray(run.get(name))
    damaged[-1] ^= 1
    run.put(name, [bytes(damaged)])
    said = verify("--resume", notes)  # it was recorded as sound, and is not read again
    assert (said["known"], said["parts"], said["ok"]) == (3, 3, True)
    assert verify("--workers", "1", status=1)["problems"][0]["part"] == name
    assert hsx("verify", store.url, "--sample", "0") == 2


def test_sound_parts_of_a_run_say_nothing_about_a_copy(store: Store, tmp_path: Path) -> None:
    """A copy has the same run id, part names and receipts. Its bytes may have been damaged on the way."""
    notes = str(tmp_path / "sound.jsonl")
    assert hsx("verify", store.url, "--resume", notes) == 0
    copy = open_store(str(shutil.copytree(tmp_path / "run", tmp_path / "copy")))
    name = sorted(i.name for i in own(copy).list("data/"))[0]
    damaged = bytearray(own(copy).get(name))
    damaged[-1] ^= 1
    own(copy).put(name, [bytes(damaged)])
    assert hsx("verify", copy.url, "--resume", notes) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("report.html", ("report", ".")),
        ("a.npz", ("cat", ".", "s0", "-o", "a.npz")),
        ("a.safetensors", ("cat", ".", "s0", "-o", "a.safetensors")),
        ("hsx-alerts.yml", ("dashboards", ".")),
    ],
)
def test_a_command_in_a_run_writes_through_no_link(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "thesis").write_text("precious")
    (tmp_path / "run" / name).symlink_to("../thesis")
    monkeypatch.chdir(tmp_path / "run")
    assert hsx(*arguments) == 0
    assert (tmp_path / "thesis").read_text() == "precious"
    assert not Path(name).is_symlink()


def test_verify_records_sound_parts_through_no_link(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").write_text("precious\n")
    (tmp_path / "sound.jsonl").symlink_to("thesis")
    assert hsx("verify", store.url, "--resume", str(tmp_path / "sound.jsonl")) == 2
    assert "Name another file" in capsys.readouterr().err
    assert (tmp_path / "thesis").read_text() == "precious\n"


def test_gc_removes_late_writes_of_a_removed_run(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    late = open_place(store)
    assert hsx("rm", store.url, "--yes") == 0
    store_run(store, SAMPLES[:2])
    late.store.put("data/part-0001-w-000009.safetensors", [b"x"])
    assert hsx("gc", store.url) == 0
    assert "1 objects of runs that were removed here" in capsys.readouterr().out
    assert hsx("gc", store.url, "--delete") == 0
    assert not any(name.startswith(late.folder) for name in names(store))


def test_rm_removes_no_run_in_a_folder_of_the_place(tmp_path: Path) -> None:
    root = open_store(str(tmp_path))
    for name in ("run-20261123", "run-7cf513b1a2b3c4d5"):
        store_run(open_store(str(tmp_path / name)), SAMPLES[:2])
    before = names(root)
    assert hsx("rm", root.url, "--yes") == 2
    store_run(root, SAMPLES)
    assert hsx("gc", root.url, "--delete") == 0
    assert hsx("rm", root.url, "--yes") == 0
    assert names(root) == before | {"run.json"}


def test_a_reader_during_a_removal_does_not_read_half_of_a_run(store: Store) -> None:
    run = open_run(store.url)
    place = open_place(store)

    class Killed(Exception):
        pass

    def kill(name: str) -> None:
        if "manifest/" in name:
            raise Killed

    with pytest.raises(Killed):
        remove_run(store, place, on_object=kill)
    with pytest.raises(RunError, match="removed"):
        run.refresh()
    assert len(run) == 6


def test_a_resumed_verify_finds_parts_that_were_lost_in_between(store: Store, tmp_path: Path) -> None:
    notes = str(tmp_path / "sound.jsonl")
    assert hsx("verify", store.url, "--resume", notes) == 0
    run = own(store)
    run.delete(min(info.name for info in run.list("data/")))
    assert hsx("verify", store.url, "--resume", notes) == 1
