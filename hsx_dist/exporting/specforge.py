"""``specforge-eagle3`` and ``specforge-dflash``: SpecForge's offline folders, ``rows_{a}-{b}/data_{i}.ckpt``.

SpecForge counts *after* a layer (its ``[1, N/2-1, N-4]`` are vLLM's ``[2, N/2, N-3]``), and takes the last state after
the final norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hsx_dist.exporting.base import ExportOptions, after_layer, any_layers, eagle3_layers, need, num_layers_of
from hsx_dist.exporting.weights import ModelEnd
from hsx_dist.reading.run import Run

#: As SpecForge's own script divides rows into folders.
_ROWS_PER_FOLDER = 2000


class _SpecForge:
    per_file = 1
    layers: tuple[int, ...]
    _aux: tuple[int, ...]
    _end: ModelEnd | None

    def file(self, first: int) -> str:
        start = first - first % _ROWS_PER_FOLDER
        return f"rows_{start}-{start + _ROWS_PER_FOLDER}/data_{first}.ckpt"

    def finish(self, run: Run, dest: Path) -> None:
        """Nothing more."""

    def _common(self, item: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        states = item["hidden_states"]
        aux = states[:, : len(self._aux)].flatten(1)[None].contiguous()
        return {"input_ids": item["input_ids"], "loss_mask": item["loss_mask"].long()}, aux

    def _last(self, item: dict[str, Any]) -> Any:
        assert self._end is not None, "a last state is only written with the model's norm"
        return self._end.norm(item["hidden_states"][:, -1])[None].contiguous()

    def statement(self) -> dict[str, Any]:
        return {
            "aux_layers": list(self._aux),
            "aux_layers_counted_after": after_layer(self._aux),
            "last_state": None if self._end is None else f"after the final RMSNorm of {self._end.model}",
        }


class Eagle3Exporter(_SpecForge):
    """``input_ids [T]``, ``loss_mask [T]`` int64, ``aux_hidden_state [1, T, 3H]``, ``hidden_state [1, T, H]``."""

    def __init__(self, run: Run, options: ExportOptions) -> None:
        last = num_layers_of(run, options)
        self._aux = eagle3_layers(run, options, last, "specforge-eagle3")
        self.layers = need(run, (*self._aux, last), "specforge-eagle3")
        self._end = ModelEnd(run, options.model)

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        import torch

        [item] = items
        data, aux = self._common(item)
        torch.save({**data, "aux_hidden_state": aux, "hidden_state": self._last(item)}, path)


class DFlashExporter(_SpecForge):
    """``input_ids [T]``, ``loss_mask [T]``, ``hidden_states [1, T, kH]``; ``with_last`` (DSpark) adds
    ``target_last_hidden_states [1, T, H]``."""

    def __init__(self, run: Run, options: ExportOptions) -> None:
        last = num_layers_of(run, options)
        self._aux = any_layers(run, options, last, "specforge-dflash")
        self.layers = need(run, (*self._aux, *([last] if options.with_last else [])), "specforge-dflash")
        self._end = ModelEnd(run, options.model) if options.with_last else None

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        import torch

        [item] = items
        data, aux = self._common(item)
        extra = {} if self._end is None else {"target_last_hidden_states": self._last(item)}
        torch.save({**data, "hidden_states": aux, **extra}, path)
