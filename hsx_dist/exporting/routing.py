"""``routing``: the experts that a model's routers chose for each token, as Parquet, for replay in training.

If the scores of two experts are nearly equal, a trainer may choose another expert than the engine. Replaying the
engine's choices prevents this: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers" (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.exporting.base import Exporter, ExportOptions, check_parquet, parquet_key
from hsx_dist.format.segment_info import MAX_HIDDEN_SIZE
from hsx_dist.reading.groups import groups
from hsx_dist.reading.run import Run
from hsx_dist.text import head

#: The most samples of a row group of the file. Their rows are in memory together.
_ROW_GROUP = 64
_IDS, _WEIGHTS = "topk_ids", "topk_weights"


class RoutingExporter(Exporter):
    """``data-NNNNNN.parquet`` with one row per sample.

    Columns: ``key``, ``input_ids`` int64 ``[T]``, ``routed_experts`` int32 ``[T, L, K]`` (vLLM's name and order), and
    ``routed_weights`` float32 ``[T, L, K]`` if the run has them.
    """

    points: tuple[str, ...] = (_IDS,)

    def __init__(self, run: Run, options: ExportOptions) -> None:
        check_parquet("routing")
        stored = run.at(0).points if len(run) else {}
        if _IDS not in stored:
            raise ConfigError(
                f"{run.url}: cannot be exported for routing: expected the point {_IDS}, got {', '.join(stored)}. "
                "Extract with capture {points: {topk_ids: all, topk_weights: all}}"
            )
        layers = stored[_IDS].layers
        self.layers = tuple(options.aux_layers or layers)
        weighted = _WEIGHTS in stored and set(self.layers) <= set(stored[_WEIGHTS].layers)
        if weighted and stored[_WEIGHTS].width != stored[_IDS].width:
            raise FormatError(
                f"{run.url}: expected a weight for each of {stored[_IDS].width} experts, got {stored[_WEIGHTS].width}. "
                "The run was not made by hsx_dist"
            )
        self.points = (_IDS, _WEIGHTS) if weighted else (_IDS,)
        if missing := sorted(set(self.layers) - set(layers)):
            raise ConfigError(
                f"{run.url}: expected layers among {list(layers)}, got {missing} too. Name stored layers (--layers)"
            )
        self.per_file = options.samples_per_file
        self._k = stored[_IDS].width
        if self._k > MAX_HIDDEN_SIZE:  # a run may store a row in many shards, each within this limit
            raise FormatError(
                f"{run.url}: expected at most {MAX_HIDDEN_SIZE} experts of a token, got {self._k}. The run was not "
                "made by hsx_dist"
            )

    def file(self, first: int) -> str:
        return f"data-{first // self.per_file:06d}.parquet"

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def routes(of: pa.DataType) -> pa.DataType:
            return pa.list_(pa.list_(pa.list_(of, self._k), len(self.layers)))

        columns = {"routed_experts": (_IDS, pa.int32())}
        if _WEIGHTS in self.points:
            columns["routed_weights"] = (_WEIGHTS, pa.float32())
        schema = pa.schema(
            [
                ("key", pa.string()),
                ("input_ids", pa.list_(pa.int64())),
                *((name, routes(of)) for name, (_, of) in columns.items()),
            ],
            metadata={"layers": ",".join(map(str, self.layers))},
        )
        with pq.ParquetWriter(path, schema) as writer:
            for rows in groups(items, _ROW_GROUP):
                ends = pa.array(np.cumsum([0, *(len(row["input_ids"]) for row in rows)]), pa.int32())
                joined = {
                    name: np.concatenate([_values(row, name) for row in rows]) for name in ("input_ids", *self.points)
                }
                arrays = [
                    pa.array([parquet_key(row["key"]) for row in rows], pa.string()),
                    pa.ListArray.from_arrays(ends, pa.array(joined["input_ids"], pa.int64())),
                ]
                for point, of in columns.values():
                    flat = pa.array(joined[point].reshape(-1), of)
                    tokens = pa.FixedSizeListArray.from_arrays(
                        pa.FixedSizeListArray.from_arrays(flat, self._k), len(self.layers)
                    )
                    arrays.append(pa.ListArray.from_arrays(ends, tokens))
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def finish(self, run: Run, new: Path) -> None:
        """Do nothing."""

    def statement(self) -> dict[str, Any]:
        return {
            "routed_experts": f"[T, {len(self.layers)}, {self._k}], decoder layers {list(self.layers)} counted from 0, "
            "experts in the router's order",
            "routed_weights": "as the router gives them" if _WEIGHTS in self.points else "not stored",
            "norm": "not applicable: choices of the routers",
            "loss_mask": "none",
        }


def _values(row: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
    """Return an array of an item, weights as float32. Raises ``FormatError`` for float ids and for integer weights."""
    x = row[name]
    if x.is_floating_point() == (name != _WEIGHTS):
        raise FormatError(
            f"{head(row['key'], 80)!a}: expected {name} in the router's dtype, got {x.dtype}. The sample is damaged: "
            "extract it again"
        )
    return (x.float() if name == _WEIGHTS else x).numpy()  # type: ignore[no-any-return]
