"""Ray Data's read tasks, without a cluster: their size, and the rows of their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.data.block import BlockAccessor

from hsx_dist import open_run
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
