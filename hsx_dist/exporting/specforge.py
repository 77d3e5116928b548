"""``specforge-eagle3``, ``-dflash``, ``-dspark``: SpecForge's offline folders, ``rows_{a}-{b}/data_{i}.ckpt``.

SpecForge counts *after* a layer: its ``[1, N/2-1, N-4]`` are vLLM's ``[2, N/2, N-3]``. It takes the last state after
the final norm. Its Domino reads DFlash's files. According to the source of specforge 0.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hsx_dist.exporting.base import ExportOptions, SampleLeftOut, eagle3_layers, layers_before_last, num_layers_of
from hsx_dist.exporting.torch_files import TorchExporter
from hsx_dist.reading.run import Run
from hsx_dist.text import head

#: Rows per folder, as in SpecForge's script.
_ROWS_PER_FOLDER = 2000


class _SpecForge(TorchExporter):
    def file(self, first: int) -> str:
        start = first - first % _ROWS_PER_FOLDER
        return f"rows_{start}-{start + _ROWS_PER_FOLDER}/data_{first}.ckpt"


class Eagle3Exporter(_SpecForge):
    """``input_ids [T]``, ``loss_mask [T]`` int64, ``aux_hidden_state [1, T, 3H]``, ``hidden_state [1, T, H]`` after the
    final norm. Refuses a number of auxiliary layers other than three."""

    def __init__(self, run: Run, options: ExportOptions) -> None:
        last = num_layers_of(run, options)
        super().__init__(run, options, "specforge-eagle3", eagle3_layers(run, options, last, "specforge-eagle3"), last)

    def _tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        states = {"aux_hidden_state": self._aux_states(item)[None], "hidden_state": self._last_state(item)[None]}
        return {**self._tokens(item), **states}


class DFlashExporter(_SpecForge):
    """``input_ids [T]``, ``loss_mask [T]`` int64, ``hidden_states [1, T, kH]``.

    Leaves out samples without two consecutive tokens that the loss counts, because SpecForge's reader fails on them.
    The reader also fails if it cuts a sample to its ``max_length``, and no such tokens remain. Refuses the last layer
    as an auxiliary layer.
    """

    trainer = "specforge-dflash"

    def __init__(self, run: Run, options: ExportOptions) -> None:
        last = num_layers_of(run, options)
        aux = layers_before_last(run, options, last, self.trainer)
        super().__init__(run, options, self.trainer, aux, last if options.with_last else None)

    def _tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        mask = item["loss_mask"]
        if not (mask[:-1] & mask[1:]).any():
            raise SampleLeftOut(
                f"{head(item['key'], 200)!a}: expected two consecutive tokens with loss_mask 1, got none. SpecForge's "
                "DFlash, Domino and DSpark refuse such a sample, so it is left out. To use it, correct its loss mask"
            )
        last = {} if self._end is None else {"target_last_hidden_states": self._last_state(item)[None]}
        return {**self._tokens(item), "hidden_states": self._aux_states(item)[None], **last}


class DSparkExporter(DFlashExporter):
    """DFlash's files with ``target_last_hidden_states [1, T, H]``, after the final norm."""

    trainer = "specforge-dspark"

    def __init__(self, run: Run, options: ExportOptions) -> None:
        super().__init__(run, replace(options, with_last=True))
