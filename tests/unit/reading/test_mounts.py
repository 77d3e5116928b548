"""A run on a mount that is gone for a moment while a process opens the run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.format.place import Place
from hsx_dist.reading.run import open_run
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run


def test_a_worker_that_starts_while_the_mount_is_gone_skips_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, away = tmp_path / "mount", tmp_path / "away"
    store_run(LocalStore(mount / "run"), [random_sample("a", layer_ids=(1,), hidden_size=4)])
    data = HiddenStatesDataset(open_run(str(mount / "run")), framework="numpy", on_error="skip", threads=1)
    pickled, removed = pickle.dumps(data), Place.removed
    mount.rename(away)
    worker = pickle.loads(pickled)

    def is_back(place: Place) -> bool:
        if away.exists():
            away.rename(mount)
        return removed(place)

    monkeypatch.setattr(Place, "removed", is_back)
    assert [sample["key"] for sample in worker] == ["a"]
