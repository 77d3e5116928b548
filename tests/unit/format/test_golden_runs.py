"""Runs of each version of ``run.json``: a complete one, and one whose driver was killed.

They are of SmolLM2, layers 2 and 15, in float32, for the rows of ``tests/golden/rows.jsonl``. ``hsx extract`` made them
with ``pool=threads``, ``part_seconds=0.05`` and ``task_rows=1``. SIGKILL ended the unfinished ones at their third
receipt. ``tests/integration/test_smollm2.py`` resumes them.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hsx_dist import open_run
from hsx_dist.config import load_config
from hsx_dist.errors import StoreError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import is_complete
from hsx_dist.jobs.attempt import begin_attempt, take_over
from hsx_dist.reading import verify_run
from hsx_dist.reading.garbage import remove_run, unfinished, unproven
from hsx_dist.reading.status import run_status
from hsx_dist.store import open_store
from tests.golden.make import FOLDER

#: key → crc32c of the states ``[n, 2, 576]`` in float32.
STATES = json.loads((FOLDER / "v1-states.json").read_text())
ROWS = {r["id"]: r["token_ids"] for r in map(json.loads, (FOLDER / "rows.jsonl").read_text().splitlines())}
KEPT = {f"row-{i}" for i in range(6)}


def read(url: str) -> dict[str, str]:
    found = {}
    for sample in open_run(url):
        data = sample.load(framework="numpy")
        assert data["token_ids"].tolist() == ROWS[sample.key]
        assert data["layer_ids"].tolist() == [2, 15]
        found[sample.key] = crc32c_hex(crc32c(np.ascontiguousarray(data["hidden_states"])))
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(name: str) -> Any:
        shutil.copytree(FOLDER / name, tmp_path / name)
        return open_store(str(tmp_path / name))

    return copy


@pytest.mark.parametrize("version", [1, 2])
def test_a_complete_run_reads_as_it_did(version: int) -> None:
    store = open_store(str(FOLDER / f"v{version}-complete"))
    assert read(store.url) == STATES
    assert verify_run(store).ok
    status = run_status(store)
    assert (status.state, status.ok) == ("complete", True)
    assert status.rows == {"total": 9, "stored": 8, "refused": 1, "failed": 0, "poison": 0, "open": 0}


@pytest.mark.parametrize("version", [1, 2])
def test_an_unfinished_run_gives_its_stored_samples(version: int) -> None:
    store = open_store(str(FOLDER / f"v{version}-unfinished"))
    assert read(store.url) == {key: STATES[key] for key in KEPT}
    assert verify_run(store).ok
    assert run_status(store, observe_seconds=0).state == "silent"


@pytest.mark.parametrize("version", [1, 2])
def test_an_unfinished_run_is_taken_over_collected_and_removed(version: int, copied: Any) -> None:
    root = copied(f"v{version}-unfinished")
    place = open_place(root)
    config = load_config(None, (), model="m", output=root.url)
    attempt = begin_attempt(config, place)
    ledger, manifest = take_over(place, attempt, Console(file=io.StringIO()))
    assert (attempt, set(manifest.samples), manifest.void) == (2, KEPT, frozenset())
    ledger.flush()
    name = "data/part-0001-local-0064c092-000004.safetensors"
    place.store.put(name, [b"its receipt never came"])
    assert [info.name for info in unproven(place, seal=True)] == [name]
    assert len(list(unfinished(root))) == (1 if version == 1 else 0)
    assert read(root.url) == {key: STATES[key] for key in KEPT}
    assert not is_complete(place.store)
    assert remove_run(root, place) > 10
    assert [info.name for info in root.list()] == ["run.json"]


def test_gc_deletes_nothing_when_listings_lack_receipts(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that ends a listing too early hides the last receipts of a log, and its seal."""
    place = open_place(copied("v2-unfinished"))
    assert unproven(place, seal=True) == []
    logs: dict[str, list[str]] = {}
    for info in place.store.list("manifest/"):
        logs.setdefault(info.name.rpartition("/")[0], []).append(info.name)
    first, *hidden = max(logs.values(), key=len)
    assert hidden
    end = f"{first.rpartition('/')[0]}/~"
    complete = place.store.list
    monkeypatch.setattr(
        place.store, "list", lambda *args, **kwargs: (i for i in complete(*args, **kwargs) if not first < i.name < end)
    )
    assert unproven(place, seal=False)
    with pytest.raises(StoreError, match="expected a listing with the seal"):
        unproven(place, seal=True)


def test_version_1_refuses_runs_that_this_version_took_over(copied: Any) -> None:
    """Version 1's check of a receipt's first bytes. It read every receipt before it started."""
    root = copied("v1-unfinished")
    place = open_place(root)
    attempt = begin_attempt(load_config(None, (), model="m", output=root.url), place)
    take_over(place, attempt, Console(file=io.StringIO()))
    begins = {root.get(info.name)[:11] for info in root.list("manifest/") if info.name.endswith(".json")}
    assert begins == {b'{"crc32c":"', b'{"seal":{"f'}
