"""Arguments of a wrong type at the public functions: one typed error with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsx_dist import ConfigError, HiddenStatesDataset, open_run
from hsx_dist.exporting import export_run
from hsx_dist.model_parts.model_files import ModelFiles
from hsx_dist.reading import verify_run
from hsx_dist.reading.retention import Retention
from hsx_dist.reading.run import Run
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = str(tmp_path_factory.mktemp("run"))
    store_run(open_store(folder), [random_sample(f"k{i}", 3 + i) for i in range(4)])
    return open_run(folder)


def dataset(run: Run, **arguments: Any) -> HiddenStatesDataset:
    return HiddenStatesDataset(run, framework="numpy", **arguments)


Call = Callable[[Run, Any, Path], Any]
NUMBERS: dict[str, Call] = {
    "rank": lambda run, value, _: dataset(run, rank=value, world_size=2),
    "world_size": lambda run, value, _: dataset(run, rank=0, world_size=value),
    "epoch": lambda run, value, _: dataset(run).set_epoch(value),
    "place": lambda run, value, _: run.at(value),
    "shard": lambda run, value, dest: export_run(run, "vllm", dest, shard=value, shards=2),
    "shards": lambda run, value, dest: export_run(run, "vllm", dest, shards=value),
}
PATHS: dict[str, Call] = {
    "source": lambda _, value, __: HiddenStatesDataset(value),
    "cache_dir": lambda run, value, _: dataset(run, cache_dir=value),
    "dest": lambda run, value, _: export_run(run, "vllm", value),
    "resume": lambda run, value, _: verify_run(run.place.root, resume=value),
}
#: A model may be absent, so that an empty value is no wrong type.
NAMED: dict[str, Call] = {**PATHS, "model": lambda _, value, __: ModelFiles(None, str(value), {})}


@pytest.mark.parametrize("value", ["1", 1.0, [1], {}, np.array([1, 2]), torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_wrong_type_is_named(run: Run, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected an integer, got .*\. Correct it"):
        NUMBERS[name](run, value, tmp_path)


@pytest.mark.parametrize("value", [1, np.int64(1), np.array(1), torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_integers_of_libraries_are_taken(run: Run, tmp_path: Path, name: str, value: Any) -> None:
    NUMBERS[name](run, value, tmp_path)


@pytest.mark.parametrize("value", [1.5, b"x", ["a"], {}], ids=repr)
@pytest.mark.parametrize("name", PATHS)
def test_a_path_of_a_wrong_type_is_named(run: Run, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected a path or a URL as text, got "):
        PATHS[name](run, value, tmp_path)


@pytest.mark.parametrize("make", [str, Path])
@pytest.mark.parametrize("name", NAMED)
def test_a_path_with_credentials_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("https://me:hunter2@host/x", "s3:k:hunter2/x@b"):
        with pytest.raises(ConfigError) as e:
            NAMED[name](run, make(url), tmp_path)
        assert "hunter2" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_a_consumers_rank_and_options_of_a_store_are_named(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"^rank: expected an integer, got '0'"):
        Retention(run.place, rank="0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^storage_options: expected a mapping, got str"):
        open_run(run.url, storage_options="key=value")  # type: ignore[arg-type]
