"""Ray Data's read tasks, without a cluster: their size, and the rows of their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from ray.data.block import BlockAccessor

from hsx_dist import open_run
from hsx_dist.errors import ConfigError
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import start_run
from hsx_dist.ray import HiddenStatesSource
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.runs import RunWriter, store_run, whole


def samples_of(count: int) -> list[RandomSample]:
    return [random_sample(f"s{i:04d}", 2, layer_ids=(2,), hidden_size=4, seed=i, odd=False) for i in range(count)]


def rows_of(url: str, tasks: int, **options: Any) -> Iterator[Mapping[str, Any]]:
    for task in HiddenStatesSource(open_run(url).select(), options).get_read_tasks(tasks):
        for block in cloudpickle.loads(cloudpickle.dumps(task))():
            yield from BlockAccessor.for_block(block).iter_rows(public_row_format=False)


def test_a_task_holds_its_own_samples_alone(tmp_path: Path) -> None:
    largest = {}
    for count in (40, 800):
        url = str(tmp_path / str(count))
        store_run(open_store(url), samples_of(count), per_part=10)
        tasks = HiddenStatesSource(open_run(url).select(), {}).get_read_tasks(count // 10)
        assert len(tasks) == count // 10
        largest[count] = max(len(cloudpickle.dumps(task)) for task in tasks)
    assert largest[800] < 1.02 * largest[40]


def test_tasks_read_each_selected_sample_once(tmp_path: Path) -> None:
    url, samples = str(tmp_path), samples_of(11)
    start_run(open_store(url), {"meaning": {"layers": [2]}})
    one = RunWriter(open_store(url), name="one")
    one.put([whole(s, i) for i, s in enumerate(samples[:6])], [RowFate("bad", 11, "refused", "why", 1)])
    two = RunWriter(open_store(url), name="two", attempt=one.attempt)
    two.put([whole(s, i) for i, s in enumerate(samples) if i >= 4])  # samples 4 and 5 have two copies
    one.complete()
    found = {row["key"]: row for row in rows_of(url, 4)}
    assert sorted(found) == [s.key for s in samples]
    for sample in samples:
        right = (sample.states.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(found[sample.key]["hidden_states"], right)


def test_a_block_is_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    store_run(open_store(url), samples_of(7))
    [task] = HiddenStatesSource(open_run(url).select(), {}).get_read_tasks(1)
    assert [block.num_rows for block in task()] == [7]
    monkeypatch.setattr("hsx_dist.reading.groups.GROUP_BYTES", 150)  # an item has 58 bytes
    assert [block.num_rows for block in task()] == [2, 2, 2, 1]


def test_a_key_that_arrow_cannot_store_is_named(tmp_path: Path) -> None:
    url = str(tmp_path)
    store_run(open_store(url), [random_sample("ok", 5), random_sample("bad\ud800", 5)])
    with pytest.raises(ConfigError, match=r"'bad\\ud800'.*expected valid Unicode"):
        list(rows_of(url, 1))
    assert len(list(rows_of(url, 1, rename={"key": None}))) == 2


@pytest.mark.parametrize("length", [1, 2])
def test_arrays_of_one_name_keep_their_type(tmp_path: Path, length: int) -> None:
    url = str(tmp_path)
    whole_numbers = {"s0000": np.full(length, 2**53 + 1), "s0001": np.full(1, 7)}
    store_run(open_store(url), samples_of(3), attached=lambda s: {"score": whole_numbers.get(s.key, np.ones(1))})
    with pytest.raises(ConfigError, match=r"score: .* got int64 of .* 's0000' and float64 of .* 's0002'"):
        list(rows_of(url, 1, rename={"score": "score"}))
    run = open_run(url)
    [task] = HiddenStatesSource(run.select(keys=["s0000", "s0001"]), {"rename": {"score": "score"}}).get_read_tasks(1)
    rows = [row for block in task() for row in BlockAccessor.for_block(block).iter_rows(public_row_format=False)]
    assert {row["key"]: np.asarray(row["score"]).tolist() for row in rows} == {
        key: right.tolist() for key, right in whole_numbers.items()
    }


def test_arrays_of_one_name_keep_their_number_of_dimensions(tmp_path: Path) -> None:
    url = str(tmp_path)
    pair = np.arange(2)
    store_run(open_store(url), samples_of(2), attached=lambda s: {"box": pair if s.key == "s0001" else pair[None]})
    expected = r"box: .* got int64 of shape \(1, 2\) in .* 's0000' and int64 of shape \(2,\) in .* 's0001'\. Read"
    with pytest.raises(ConfigError, match=expected):
        list(rows_of(url, 1, rename={"box": "box"}))
