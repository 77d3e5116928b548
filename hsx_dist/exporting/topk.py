"""``topk-logprobs``: the teacher's most likely next tokens at each position, from layer N's states, as Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hsx_dist.exporting.base import Exporter, ExportOptions, check_parquet, need, num_layers_of, parquet_key
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.reading.groups import groups
from hsx_dist.reading.run import Run

#: The most samples of a row group of the file. Their rows are in memory together.
_ROW_GROUP = 64


class TopKExporter(Exporter):
    """``data-NNNNNN.parquet`` with one row per sample.

    Columns: ``key``; ``input_ids`` and ``completion_mask`` int64 ``[T]`` (TRL's names for tokenised rows);
    ``teacher_topk_ids`` int32 and ``teacher_topk_logprobs`` float32 ``[T, K]``, the most likely token first. Entry *t*
    is for token *t + 1*.
    """

    def __init__(self, run: Run, options: ExportOptions) -> None:
        check_parquet("topk-logprobs")
        last = num_layers_of(run, options)
        self.layers = need(run, (last,), "topk-logprobs")
        self.per_file = options.samples_per_file
        self._k = options.top_k
        self._end = ModelEnd(run, options.model, last)

    def file(self, first: int) -> str:
        return f"data-{first // self.per_file:06d}.parquet"

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [
                ("key", pa.string()),
                ("input_ids", pa.list_(pa.int64())),
                ("completion_mask", pa.list_(pa.int64())),
                ("teacher_topk_ids", pa.list_(pa.list_(pa.int32()))),
                ("teacher_topk_logprobs", pa.list_(pa.list_(pa.float32()))),
            ],
            metadata={"teacher": self._end.model},
        )
        with pq.ParquetWriter(path, schema) as writer:
            for rows in groups(map(self._row, items), _ROW_GROUP):
                listed = [{name: _listed(x) for name, x in row.items()} for row in rows]
                writer.write_table(pa.Table.from_pylist(listed, schema))

    def _row(self, item: dict[str, Any]) -> dict[str, Any]:
        import torch

        ids, values = self._end.top_k(item["hidden_states"][:, 0], self._k)
        return {
            "key": parquet_key(item["key"]),
            "input_ids": item["input_ids"].numpy(),
            "completion_mask": item["loss_mask"].long().numpy(),
            "teacher_topk_ids": ids.to(torch.int32).numpy(),
            "teacher_topk_logprobs": values.numpy(),
        }

    def finish(self, run: Run, new: Path) -> None:
        """Do nothing."""

    def statement(self) -> dict[str, Any]:
        return {
            "teacher_topk_logprobs": f"natural logarithms, top {self._k} of the whole vocabulary, of the token after "
            f"each position, by layer {self.layers[0]}, the final norm and lm_head of {self._end.model}",
            "model_revision": self._end.files.revision,
            "loss_mask": "completion_mask, int64 0/1",
        }


def _listed(x: Any) -> Any:
    """Return a matrix as a list of its rows, because Arrow converts no matrices."""
    return list(x) if getattr(x, "ndim", 1) == 2 else x
