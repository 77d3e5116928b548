"""``modelopt``: NVIDIA ModelOpt's offline files, ``{key}.pt``, for its EAGLE, DFlash, Domino and DSpark.

ModelOpt counts *after* a layer: its EAGLE-3 default ``[1, N/2-1, N-4]`` is vLLM's ``[2, N/2, N-3]``. It takes the last
state after the final norm, unless a file has ``hidden_states_prenorm``, which ModelOpt before 0.46 ignores. According
to the source of nvidia-modelopt 0.47.
"""

from __future__ import annotations

from typing import Any

from hsx_dist.exporting.base import ExportOptions, layers_before_last, num_layers_of
from hsx_dist.exporting.torch_files import TorchExporter
from hsx_dist.page import object_name
from hsx_dist.reading.run import Run


class ModelOptExporter(TorchExporter):
    """``input_ids [T]``, ``loss_mask [T]`` int64, ``aux_hidden_states [T, kH]``, ``hidden_states [T, H]`` after the
    final norm.

    ``OfflineSupervisedDataset`` reads the mask only with ``answer_only_loss=True``. Refuses the last layer as an
    auxiliary layer.
    """

    def __init__(self, run: Run, options: ExportOptions) -> None:
        last = num_layers_of(run, options)
        super().__init__(run, options, "modelopt", layers_before_last(run, options, last, "modelopt"), last)
        self._keys = run.index.keys

    def file(self, first: int) -> str:
        return f"{object_name(self._keys[first])}.pt"

    def _tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        states = {"aux_hidden_states": self._aux_states(item), "hidden_states": self._last_state(item)}
        return {**self._tokens(item), **states}
