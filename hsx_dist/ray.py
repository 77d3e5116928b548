"""Read runs with Ray Data, for Ray Train and pipelines (``read_hidden_states``), and export them in Ray tasks.

Every node needs this package's extra ``ray-data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import Dataset
from ray.data.block import Block, BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError

from hsx_dist.config import absolute_path
from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.exporting import ExportOptions, ExportReport, export_run
from hsx_dist.exporting.export import exporter_of
from hsx_dist.lazy import cached_property
from hsx_dist.ray_arguments import sendable
from hsx_dist.ray_calls import redacted_errors, remote
from hsx_dist.reading import Run, open_run
from hsx_dist.reading.column import StoredPoint
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.groups import groups
from hsx_dist.reading.index import Index
from hsx_dist.reading.select import Selection
from hsx_dist.text import head

#: The most samples of a block of Ray Data.
_BLOCK_SAMPLES = 32


class HiddenStatesSource(Datasource):  # type: ignore[misc]
    """Samples of a run, read part by part in Ray tasks. See ``read_hidden_states``."""

    def __init__(self, selection: Selection, options: Mapping[str, Any]):
        super().__init__()
        self._selection, self._options = selection, dict(options)
        if (options.get("rename") or {}).get("key", "key") is not None:
            _require_utf8(selection)

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of all states, decoded to float32 if they are bf16."""
        return int(self._bytes(self._selection.places))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return at most ``parallelism`` tasks. Each reads samples that are neighbours in their parts."""
        del data_context
        run, index, places = self._selection.run, self._selection.run_index, self._selection.places
        ordered = places[np.argsort(index.part_of[places], kind="stable")]
        groups = [g for g in np.array_split(ordered, max(1, min(parallelism, len(ordered)))) if len(g)]
        return [
            ReadTask(
                _reader(_alone(run, index.only(np.sort(group))), self._options),
                BlockMetadata(
                    # Some rows may be skipped.
                    num_rows=None if self._options.get("on_error") == "skip" else len(group),
                    size_bytes=int(self._bytes(group)),
                    input_files=None,
                    exec_stats=None,
                ),
                per_task_row_limit=per_task_row_limit,
            )
            for group in groups
        ]

    def _bytes(self, places: np.ndarray[Any, Any]) -> float:
        return 2 * self._share * float(self._selection.run_index.raw_bytes[places].sum())

    @cached_property
    def _share(self) -> float:
        """The share of a sample's bytes that is read."""
        run, layers, points = self._selection.run, self._options.get("layers"), self._options.get("points")
        if points is None:
            return len(layers) / len(run.layer_ids) if layers is not None and run.layer_ids else 1.0
        if not len(self._selection.places):
            return 1.0
        first = run.sample_of(self._selection.run_index[int(self._selection.places[0])])
        rows = {name: _row_bytes(point) for name, point in first.points.items()}
        wanted = sum(rows[name] * len(first.points[name].layers if layers is None else layers) for name in points)
        return wanted / sum(rows[name] * len(point.layers) for name, point in first.points.items())


def _alone(run: Run, index: Index) -> Selection:
    """The samples of ``index``, of a copy of the run that has no others.

    With the run's whole index in each task, all tasks together would grow with the square of the run's size.
    """
    return Selection(run.snapshot(index), index, np.arange(len(index)))


def _row_bytes(point: StoredPoint) -> int:
    return point.width * (2 if point.dtype in ("bfloat16", "float16") else 4)


def _reader(selection: Selection, options: Mapping[str, Any]) -> Callable[[], Iterable[Block]]:
    def read() -> Iterable[Block]:
        with redacted_errors():
            yield from blocks()

    def blocks() -> Iterable[Block]:
        import pyarrow as pa
        from ray.data.extensions import ArrowTensorArray

        def block(items: list[dict[str, Any]]) -> Block:
            columns = {
                name: [item[name] for item in items]
                if isinstance(items[0][name], str)
                else ArrowTensorArray.from_numpy(_joined(name, items))
                for name in items[0]
            }
            items.clear()
            return pa.table(columns)

        dataset = HiddenStatesDataset(selection, framework="numpy", rank=0, world_size=1, **options)
        yield from map(block, groups(dataset, _BLOCK_SAMPLES))

    return read


def _require_utf8(selection: Selection) -> None:
    for key in selection.keys():  # noqa: SIM118 - a list
        if not key.isascii() and any("\ud800" <= c <= "\udfff" for c in key):
            raise ConfigError(
                f"key {head(key, 100)!a}: expected valid Unicode, which Arrow requires, got a lone surrogate. Leave "
                "the sample out with select, or pass rename={'key': None}"
            )


def _joined(name: str, items: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Join the arrays ``name`` into one array for Ray's tensor columns: an object array if their lengths differ."""
    arrays: list[np.ndarray[Any, Any]] = [item[name] for item in items]
    first = arrays[0]
    for i, a in enumerate(arrays):
        # numpy would turn two types into a third one: integers above 2**53 change. Ray stores one number of dimensions.
        if (a.dtype.kind, a.ndim) != (first.dtype.kind, first.ndim):
            raise ConfigError(
                f"{name}: expected arrays of one type and one number of dimensions in all samples, got {first.dtype} "
                f"of shape {first.shape} in sample {items[0].get('key', 0)!r} and {a.dtype} of shape {a.shape} in "
                f"sample {items[i].get('key', i)!r}. Read the samples of each kind with a selection of their keys, or "
                "leave the array out of rename"
            )
    if len({a.shape for a in arrays}) == 1:
        return np.stack(arrays)
    out = np.empty(len(arrays), object)
    for i, a in enumerate(arrays):
        out[i] = a
    return out


def read_hidden_states(
    source: str | Run | Selection,
    *,
    points: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Return a Ray ``Dataset`` with one row per sample.

    Columns: ``input_ids``, ``loss_mask``, ``hidden_states``, ``layer_ids``, ``key``. States are numpy arrays. bf16
    becomes float32, which represents it exactly: Arrow has no bf16 tensors.

    Args:
        source: a run's path or URL, an open run, or a selection of a run.
        points: points of the model other than the hidden states; see ``HiddenStatesDataset``. A row has one column for
            each point instead of ``hidden_states`` and ``layer_ids``.
        layers: vLLM's layer ids; ``None``: all stored layers. Each of the ``points`` must have them.
        override_num_blocks, concurrency, ray_remote_args: see ``ray.data.read_datasource``.
        options: for ``HiddenStatesDataset``: ``tokens``, ``max_tokens``, ``rename``, ``loss_mask``, ``on_error``, …
            With ``on_error="skip"``, tasks log skipped samples. Compare the number of rows with that of the samples.

    Raises:
        ConfigError: an option is not allowed here; the first sample lacks a point or layer; a key is no valid
            Unicode, unless ``rename`` removes keys. While reading: arrays of one name have several types or numbers of
            dimensions.
        RunError, StoreError: see ``open_run``.

    Example:
        >>> from hsx_dist.ray import read_hidden_states
        >>> states = read_hidden_states("s3://bucket/run", layers=[15], override_num_blocks=8)  # doctest: +SKIP
    """
    wrong = sorted({"follow", "repeat", "shuffle", "rank", "world_size", "framework"} & set(options))
    if wrong:
        raise ConfigError(
            f"expected options for reading single samples, got {wrong}. Remove them. Shuffle and divide with Ray Data"
        )
    if not isinstance(source, (Run, Selection)):
        source = open_run(source, storage_options=storage_options)
    selection = source if isinstance(source, Selection) else source.select()
    run = selection.run
    sendable(run.store, "storage_options")
    if layers is not None:
        options["layers"] = list(layers)
    if points is not None:
        options["points"] = list(dict.fromkeys(points)) if not isinstance(points, str) else points
    HiddenStatesDataset(selection, rank=0, world_size=1, framework="numpy", **options)  # raises for wrong options
    if points is not None and len(selection.places):  # only samples have the names of their points, not the run
        run.sample_of(selection.run_index[int(selection.places[0])]).load(layers, (0, 0), "numpy", points=points)
    return ray.data.read_datasource(
        HiddenStatesSource(selection, options),
        override_num_blocks=override_num_blocks,
        concurrency=concurrency,
        ray_remote_args=dict(ray_remote_args or {}),
    )


def export(
    url: str,
    to: str,
    dest: str,
    options: ExportOptions | None = None,
    *,
    shards: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Run ``export_run`` in Ray tasks of one CPU each.

    Resumes an interrupted export. The files for the whole data set are written at the end, by this process.

    Args:
        url: the run's path or URL, which all nodes can read.
        dest: a folder that all nodes share.
        shards: number of tasks. ``None``: the cluster's number of CPUs.

    Other arguments and errors: as ``export_run``.

    Example:
        >>> from hsx_dist.ray import export
        >>> export("s3://bucket/run", "vllm", "/mnt/shared/states", shards=8).finished  # doctest: +SKIP
        True
    """
    url, dest = (absolute_path(path, Path.cwd()) for path in (url, dest))  # workers have other working folders
    run = open_run(url, storage_options=sendable(storage_options, "storage_options"))
    exporter_of(to)(run, options or ExportOptions())  # raises for wrong options here, not in a task
    count = shards or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def work(shard: int) -> ExportReport:
        own = open_run(url, storage_options=storage_options)
        return export_run(own, to, dest, options, shard=shard, shards=count, finish=False)

    task = remote(work, num_cpus=1, max_retries=3)
    try:
        reports = ray.get([task.remote(shard) for shard in range(count)])
    except RayTaskError as e:
        raise (e.cause if isinstance(e.cause, HsxError) else e) from None
    last = export_run(run, to, dest, options)
    written, there = sum(r.written for r in reports), sum(r.there for r in reports)
    return ExportReport(written, there, last.finished, last.left_out)
