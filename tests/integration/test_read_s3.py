"""Reading from a real S3 server: forked and spawned workers, a cache, following, and removal of used parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hsx_dist import HiddenStatesDataset, open_run
from hsx_dist.reading.collate import pad
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run
from tests.harness.servers import S3Server

pytestmark = pytest.mark.integration

SAMPLES = {f"s{i:02d}": random_sample(f"s{i:02d}", 9 + i, seed=i, odd=False) for i in range(12)}


@pytest.fixture(scope="module")
def url(s3: S3Server) -> str:
    path = f"{s3.url}/reading/run"
    store_run(open_store(path, s3.storage_options), list(SAMPLES.values()), per_part=3)
    return path


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_an_object_store(url: str, s3: S3Server, context: str) -> None:
    run = open_run(url, storage_options=s3.storage_options)
    assert run.at(0).load()["key"] == "s00"  # the parent's client has connections and threads before the fork
    dataset = HiddenStatesDataset(run, layers=[15], shuffle=True)
    loader: Any = DataLoader(dataset, 3, num_workers=2, collate_fn=pad, multiprocessing_context=context, timeout=120)
    seen = []
    for batch in loader:
        for i, key in enumerate(batch["key"]):
            states = batch["hidden_states"][i, : int(batch["lengths"][i])].contiguous()
            assert np.array_equal(states.view(torch.int16).numpy().view(np.uint16), SAMPLES[key].states[:, [1]])
            seen.append(key)
    assert sorted(seen) == sorted(SAMPLES)


_FORKS = """
import json, multiprocessing, sys
from hsx_dist import load_hidden_states, open_run
url, options = sys.argv[1], json.loads(sys.argv[2])
def read(run, key): return len(run[key].load(framework="numpy")["token_ids"])
def opened(_, key): return read(open_run(url, storage_options=options), key)
def loaded(_, key): return len(load_hidden_states(url, key, storage_options=options, framework="numpy")["token_ids"])
run = open_run(url, storage_options=options)
assert read(run, "s00") == 9
with multiprocessing.get_context("fork").Pool(1) as pool:
    for function in (read, opened, loaded):
        assert pool.apply_async(function, (run, "s01")).get(60) == 10
assert read(run, "s02") == 11
"""


def test_a_forked_process_opens_a_store_and_its_parent_goes_on(url: str, s3: S3Server) -> None:
    code = [sys.executable, "-c", _FORKS, url, json.dumps(s3.storage_options)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cache_is_read_when_the_store_is_gone(url: str, s3: S3Server, tmp_path: Path) -> None:
    run = open_run(url, storage_options=s3.storage_options)

    def keys() -> list[str]:
        return [i["key"] for i in HiddenStatesDataset(run, cache_dir=tmp_path / "cache", framework="numpy")]

    first = keys()
    run._mine, run._reopen = MemoryStore(run.store.url), None  # an empty one
    assert keys() == first == sorted(SAMPLES)


def test_a_run_is_used_up_while_it_is_followed(s3: S3Server) -> None:
    path = f"{s3.url}/reading/used"
    store = open_store(path, s3.storage_options)
    store = store_run(store, list(SAMPLES.values()), per_part=3).store
    dataset = HiddenStatesDataset(path, follow=True, storage_options=s3.storage_options)
    retention = dataset.retention("train")
    left = []
    for item in dataset:
        retention.ack(item["key"])
        left.append(len(list(store.list("data/"))))
    assert left[-1] == 0
    assert sorted(left, reverse=True) == left
