"""Base class of exporters into torch files: tensors by name, auxiliary layers, the last state after the norm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hsx_dist.exporting.base import Exporter, ExportOptions, after_layer, need
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.reading.run import Run


class TorchExporter(Exporter):
    """One file per sample with tensors only: ``torch.load(path, weights_only=True)`` reads it.

    Args:
        aux: vLLM's ids of the auxiliary layers, in the order of their columns.
        last: the model's number of layers, for files with the last state; ``None``: without it.

    Raises:
        ConfigError: the run lacks a layer, or its model's final norm is unknown.

    Example:
        >>> from hsx_dist.exporting import ExportOptions
        >>> from hsx_dist.exporting.torch_files import TorchExporter
        >>> class TwoLayers(TorchExporter):
        ...     def __init__(self, run, options):
        ...         super().__init__(run, options, "two-layers", aux=(2, 15), last=None)
        ...     def _tensors(self, item):
        ...         return {"states": self._aux_states(item)}
        >>> TwoLayers(run, ExportOptions()).statement()["aux_layers"]
        [2, 15]
    """

    per_file = 1

    def __init__(self, run: Run, options: ExportOptions, trainer: str, aux: tuple[int, ...], last: int | None) -> None:
        self._aux = aux
        self.layers = need(run, aux if last is None else (*aux, last), trainer)
        self._end = None if last is None else ModelEnd(run, options.model, last)

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        import torch

        [item] = items
        tensors = {name: _compact(tensor) for name, tensor in self._tensors(item).items()}
        with path.open("wb") as f:  # given a path, torch hides the disk's error
            torch.save(tensors, f)

    def _tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the file's tensors by name."""
        raise NotImplementedError

    def _tokens(self, item: dict[str, Any]) -> dict[str, Any]:
        """``input_ids`` and ``loss_mask``, int64 ``[T]``."""
        return {"input_ids": item["input_ids"], "loss_mask": item["loss_mask"].long()}

    def _aux_states(self, item: dict[str, Any]) -> Any:
        """``[T, kH]``, the run's dtype."""
        return item["hidden_states"][:, : len(self._aux)].flatten(1)

    def _last_state(self, item: dict[str, Any]) -> Any:
        """``[T, H]``, the run's dtype."""
        assert self._end is not None, "a last state is only written with the model's norm"
        return self._end.norm(item["hidden_states"][:, -1])

    def finish(self, run: Run, new: Path) -> None:
        """Do nothing."""

    def statement(self) -> dict[str, Any]:
        return {
            "aux_layers": list(self._aux),
            "aux_layers_counted_after": after_layer(self._aux),
            "last_state": None if self._end is None else f"after the final RMSNorm of {self._end.model}",
            "last_layer": None if self._end is None else self.layers[-1],
            "model_revision": None if self._end is None else self._end.files.revision,
            "norm": f"auxiliary layers: none applied; last state: {'not stored' if self._end is None else 'applied'}",
            "loss_mask": "int64 0/1 [T]; ones for a sample without one",
        }


def _compact(tensor: Any) -> Any:
    """Return the tensor, copied if it is a view: ``torch.save`` would store all memory behind the view."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
