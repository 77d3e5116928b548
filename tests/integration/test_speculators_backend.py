"""speculators' own data set on this project's back end, without an export."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hs_connectors import HiddenStatesBackend
from speculators.train.data import ArrowDataset
from torch.utils.data import DataLoader

from hsx_dist.errors import ConfigError, StoreError
from hsx_dist.format.names import part_name
from hsx_dist.speculators import HsxBackend, HsxTransfer
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run

pytestmark = pytest.mark.integration

SECRET = "hunter2-not-to-be-seen"
SAMPLES = [random_sample(f"r{i}", 5 + i, layer_ids=(2, 4, 5, 8), seed=i, odd=False) for i in range(6)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(a run, speculators' prepared data set of the same rows)"""
    folder = tmp_path_factory.mktemp("speculators")
    store_run(open_store(str(folder / "run")), SAMPLES, per_part=2)
    ids = [s.token_ids.tolist() for s in SAMPLES]
    rows = {"input_ids": ids, "loss_mask": [[1] * len(i) for i in ids], "seq_len": [len(i) for i in ids]}
    Dataset.from_dict(rows).with_format("torch").save_to_disk(str(folder / "data"))
    return str(folder / "run"), folder / "data"


def transfer(run: str, layers: str | None = "2,4,5,8") -> HsxTransfer:
    parser = argparse.ArgumentParser()
    HiddenStatesBackend.registry["hsx"].add_train_args(parser)
    args = ["--hsx-run", run, *(["--hsx-layers", layers] if layers else [])]
    return HsxBackend.from_train_args(parser.parse_args(args), "unused")


def test_the_trainers_data_set_reads_from_the_run(prepared: tuple[str, Path]) -> None:
    run, data = prepared
    dataset = ArrowDataset(64, data, transfer=transfer(run), on_missing="raise")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for item, sample in zip(loader, SAMPLES, strict=True):
        bits = item["hidden_states"].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, sample.states[:, :3].reshape(len(sample.token_ids), -1))
        last = item["verifier_last_hidden_states"].contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(last, sample.states[:, 3])


def test_missing_samples_are_none_and_missing_layers_raise(prepared: tuple[str, Path]) -> None:
    run, _ = prepared
    assert transfer(run).get_cached(99) is None
    assert pickle.loads(pickle.dumps(transfer(run, None))).get_cached(0)["hidden_states"].shape[1] == 4
    with pytest.raises(ConfigError, match=r"\[3\]"):
        transfer(run, "3,8").get_cached(0)
    with pytest.raises(ConfigError, match="hsx-layers"):
        transfer(run, "x")
    with pytest.raises(ConfigError, match="hsx-storage-path"):
        HsxBackend.build_kv_transfer_config(argparse.Namespace(hsx_storage_path=None))


def test_samples_of_a_server_are_read_and_removed(prepared: tuple[str, Path], tmp_path: Path) -> None:
    from hsx_dist.cli import main

    run, _ = prepared
    path = tmp_path / "answer.safetensors"
    with pytest.raises(SystemExit):
        main(["cat", run, "r3", "-o", str(path)])
    reader = HsxTransfer(None, None, wait=1, delete_generated=True, storage_path=str(tmp_path))
    got = reader.get_generated({"hidden_states_path": str(path)})
    assert got is not None
    assert got["token_ids"].tolist() == SAMPLES[3].token_ids.tolist()
    reader.delete(str(path))
    assert not path.exists()
    (tmp_path / "failed.error.json").write_text('{"error": "aborted"}')
    assert reader.get_generated({"hidden_states_path": str(tmp_path / "failed.safetensors")}) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("storage", ["", "run", "data", "link"])
def test_a_runs_parts_are_never_removed(
    tmp_path: Path, version: int, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs"
    store = open_store(str(folder / "run"))
    if version == 1:
        store.put(part_name(1, "w", 1), [b"part"])
    else:
        store_run(store, SAMPLES[:2], per_part=2)
    (part,) = (folder / "run").rglob("*.safetensors")
    (tmp_path / "link").symlink_to(part.parent)
    places = {"": folder, "run": folder / "run", "data": part.parent, "link": tmp_path / "link"}
    reader = HsxTransfer(None, None, delete_generated=True, storage_path=str(places[storage]))
    # As if an answer had named the part, and it had been loaded.
    reader._loaded[part.relative_to(places[storage].resolve()).as_posix()] = ({}, "")
    monkeypatch.setattr("hsx_dist.speculators._delete_if", lambda store, name, _: store.delete(name))
    reader.delete(str(part))
    assert part.exists()


def test_objects_outside_the_storage_path_are_neither_read_nor_removed(
    prepared: tuple[str, Path], tmp_path: Path
) -> None:
    from hsx_dist.cli import main

    run, _ = prepared
    (tmp_path / "states").mkdir()
    outside = tmp_path / "outside.safetensors"
    with pytest.raises(SystemExit):
        main(["cat", run, "r3", "-o", str(outside)])
    (tmp_path / "states" / "link.safetensors").symlink_to(outside)
    (tmp_path / "states" / "up").symlink_to(tmp_path)
    reader = HsxTransfer(run, None, delete_generated=True, storage_path=str(tmp_path / "states"))
    for named in (
        str(outside),
        f"{tmp_path}/states/../outside.safetensors",
        f"{tmp_path}/states/up/outside.safetensors",
        f"file://{outside}",
        "http://169.254.169.254/latest/meta-data.safetensors",
        "s3://another/x.safetensors",
        run,
    ):
        with pytest.raises(ConfigError, match="expected a path or URL under it"):
            reader.get_generated({"hidden_states_path": named, "hidden_states_key": "r3"})
        if named.endswith(".safetensors"):
            with pytest.raises(ConfigError, match="expected a path or URL under it"):
                reader.delete(named)
    with pytest.raises(StoreError, match="links are not followed"):
        reader.get_generated({"hidden_states_path": f"{tmp_path}/states/link.safetensors"})
    for odd in ("x" * 5000, "\ud800", "a\0b"):
        with pytest.raises(ConfigError, match="expected a path or URL under it"):
            reader.get_generated({"hidden_states_path": f"{tmp_path}/states/{odd}.safetensors"})
    for wrong in (None, 3, [str(outside)]):
        with pytest.raises(ConfigError, match="expected a path or URL under it"):
            reader.get_generated({"hidden_states_path": wrong})
    assert outside.is_file()
    without = transfer(run)  # no storage path is configured
    with pytest.raises(ConfigError, match="--hsx-storage-path"):
        without.get_generated({"hidden_states_path": str(outside)})


def test_a_credential_is_no_argument(prepared: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    HsxBackend.add_train_args(parser)

    def options(text: str) -> HsxTransfer:
        return HsxBackend.from_train_args(parser.parse_args(["--hsx-storage-options", text]), "unused")

    monkeypatch.setenv("HSX_TEST_SECRET", "hunter2")
    made = options('{"secret": "${env:HSX_TEST_SECRET}", "client_kwargs": {"region_name": "eu"}}')
    assert made._options == {"secret": "hunter2", "client_kwargs": {"region_name": "eu"}}
    with pytest.raises(ConfigError, match="no credential on a command line") as e:
        options('{"secret": "hunter2"}')
    assert "hunter2" not in str(e.value)
    for wrong in ("[1]", "x", '{"a":'):
        with pytest.raises(ConfigError, match="storage-options"):
            options(wrong)


def test_the_trainers_command_knows_the_back_end() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hsx_dist.speculators", "train", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--hsx-run" in done.stdout


def run_trainer(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a model that does not exist. speculators first stores its arguments in ``folder/out``."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "hsx_dist.speculators", "train", "--hidden-states-backend", "hsx"),
            *("--speculator-type", "eagle3", "--data-path", "data", "--save-path", str(folder / "out"), *given),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_trainers_command_stores_no_credential_of_an_argument(tmp_path: Path) -> None:
    done = run_trainer(tmp_path, "--verifier-name-or-path", "./none", "--hsx-run", f"https://me:{SECRET}@host/run")
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "expected no credential on a command line" in done.stderr
    assert SECRET not in done.stderr


def test_the_error_that_ends_the_trainers_command_is_redacted(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"train: {{verifier: {{verifier_name_or_path: 'https://me:{SECRET}@host/model'}}}}")
    done = run_trainer(tmp_path, "--config", str(config))
    assert done.returncode == 1
    assert "https://host/model" in done.stderr
    assert "please report it with the lines above" in done.stderr
    assert SECRET not in done.stdout + done.stderr
