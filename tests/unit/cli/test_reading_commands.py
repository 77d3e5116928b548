"""``hsx cat``, ``export``, ``gc``, ``rm``, ``verify`` and the fuller ``show``, on runs that the real writer stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsx_dist import open_run
from hsx_dist.cli import main
from hsx_dist.format.runs import beat, take_attempt
from hsx_dist.reading.liveness import require_dead
from hsx_dist.store import Store, open_store
from hsx_dist.testing.runs import store_run
from hsx_dist.testing.samples import RandomSample, random_sample

SAMPLES = [random_sample(f"s{i}", 9 + i, seed=i, odd=False) for i in range(6)]


def mask_of(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss_mask": np.arange(len(sample.token_ids)) > 2}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "run"))
    store_run(made, SAMPLES, per_part=2, attached=mask_of, about={"num_hidden_layers": 30})
    return made


def hsx(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(args)
    return int(e.value.code or 0)


def test_cat_writes_what_was_asked_for(store: Store, tmp_path: Path) -> None:
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


def test_show_tells_outlier_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_show_tells_the_tokens_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "3 files written, 3 were there; whole" in capsys.readouterr().out
    assert hsx("export", store.url, str(tmp_path / "x"), "--to", "specforge-eagle3") == 2
    assert "[27] are not in the run" in capsys.readouterr().err
    assert hsx("export", store.url, str(tmp_path / "x"), "--to", "vllm", "--shard", "a") == 2


def test_gc_removes_what_no_receipt_names_and_nothing_else(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(i.name for i in store.list())
    garbage = "data/part-0001-dead-11111111-000001.safetensors"
    for name in (garbage, "data/notes.txt", "data/part-0002-later-000001.safetensors", "other/part.safetensors"):
        store.put(name, [b"x" * 100])
    assert hsx("gc", store.url, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": store.url,
        "deleted": False,
        "garbage": [garbage],
        "bytes": 100,
        "unfinished": [],
    }
    assert hsx("gc", store.url, "--delete") == 0
    left = {i.name for i in store.list()} - set(before)
    assert left == {"data/notes.txt", "data/part-0002-later-000001.safetensors", "other/part.safetensors"}
    assert hsx("verify", store.url) == 0


def test_nothing_is_removed_while_an_attempt_is_alive(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = take_attempt(store, {})
    store.put("data/part-0001-dead-000001.safetensors", [b"x"])
    beat(store, attempt, 1, "running")
    beats = iter(range(2, 100))

    def asleep(_: float) -> None:
        beat(store, attempt, next(beats), "running")

    before = sorted(i.name for i in store.list())
    monkeypatch.setattr("hsx_dist.cli.gc.require_dead", lambda s, **_: require_dead(s, sleep=asleep))
    for command in (["gc", store.url, "--delete"], ["rm", store.url, "--yes"]):
        assert hsx(*command) == 2
        assert "is alive" in capsys.readouterr().err
    assert sorted(i.name for i in store.list()) == before
    beat(store, attempt, 1000, "stopped")
    assert hsx("gc", store.url, "--delete") == 0
    assert "data/part-0001-dead-000001.safetensors" not in {i.name for i in store.list()}


def test_a_silent_attempt_is_dead_after_a_while(store: Store) -> None:
    take_attempt(store, {})
    store.put("data/part-0002-dead-000001.safetensors", [b"x"])
    assert hsx("gc", store.url, "--delete", "--watch", "0.1") == 0
    assert "data/part-0002-dead-000001.safetensors" not in {i.name for i in store.list()}


def test_gc_removes_files_that_were_never_finished(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    left = [f"{folder}.hsx-unfinished-0123" for folder in ("", "data/", "manifest/")]
    for name in left:
        Path(store.url, name).write_bytes(b"half")
    assert hsx("gc", store.url) == 0
    said = capsys.readouterr().out
    assert "never finished data/.hsx-unfinished-0123" in said
    assert "3 files that were never finished, 12 B, can go" in said
    assert hsx("gc", store.url, "--delete", "--json") == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == left
    assert not any(Path(store.url, name).exists() for name in left)
    assert hsx("verify", store.url) == 0


def test_rm_removes_the_run_and_nothing_else(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("mine.txt", [b"x"])
    Path(store.url, "data/.hsx-unfinished-0123").write_bytes(b"half")
    assert hsx("rm", store.url) == 0
    assert "6 samples in 3 parts" in capsys.readouterr().out
    assert len(open_run(store.url)) == 6
    assert hsx("rm", store.url, "--yes") == 0
    assert [i.name for i in store.list()] == ["mine.txt"]
    assert not Path(store.url, "data/.hsx-unfinished-0123").exists()
    assert "mine.txt" in capsys.readouterr().out
    assert hsx("rm", store.url, "--yes") == 2


def test_verify_takes_samples_and_goes_on(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = str(tmp_path / "sound.jsonl")

    def verify(*args: str, status: int = 0) -> Any:
        assert hsx("verify", store.url, "--json", *args) == status
        return json.loads(capsys.readouterr().out)

    assert verify("--sample", "0.34", "--seed", "1")["parts"] < 3
    assert verify("--resume", notes)["known"] == 0
    with Path(notes).open("a") as f:
        f.write('{"part": "torn')
    name = sorted(i.name for i in store.list("data/"))[0]
    damaged = bytearray(store.get(name))
    damaged[-1] ^= 1
    store.put(name, [bytes(damaged)])
    said = verify("--resume", notes)  # it was noted as sound, and is not read again
    assert (said["known"], said["parts"], said["ok"]) == (3, 3, True)
    assert verify("--workers", "1", status=1)["problems"][0]["part"] == name
    assert hsx("verify", store.url, "--sample", "0") == 2
