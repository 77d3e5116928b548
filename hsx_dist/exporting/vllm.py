"""``vllm``: one file per sample, in the format of vLLM's ``ExampleHiddenStatesConnector``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hsx_dist.exporting.base import Exporter, ExportOptions, need, stored_layers
from hsx_dist.page import object_name
from hsx_dist.reading.run import Run


class VllmExporter(Exporter):
    """``KEY.safetensors``: ``hidden_states`` ``[T, L, H]``, ``token_ids`` int64 ``[T]``; with ``loss_mask`` if any."""

    per_file = 1
    rows_alone = True

    def __init__(self, run: Run, options: ExportOptions) -> None:
        self.layers = need(run, options.aux_layers or stored_layers(run), "vllm")
        self._keys = run.index.keys

    def file(self, first: int) -> str:
        return f"{object_name(self._keys[first])}.safetensors"

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        from safetensors.torch import save_file

        [item] = items
        tensors = {"hidden_states": item["hidden_states"].contiguous(), "token_ids": item["input_ids"].contiguous()}
        if not item["loss_mask"].all():
            tensors["loss_mask"] = item["loss_mask"].contiguous()
        save_file(tensors, path)

    def finish(self, run: Run, new: Path) -> None:
        """Do nothing."""

    def statement(self) -> dict[str, Any]:
        return {
            "hidden_states": f"[T, L, H], layers {list(self.layers)}; no norm applied",
            "layers": list(self.layers),
            "tokens": "as stored: those that the run's select chose, not always consecutive",
            "loss_mask": "bool [T]; a file without one means all ones",
        }
