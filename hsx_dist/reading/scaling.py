"""Scale states by a run's statistics, and convert them to a trainer's dtype and device."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arrays import resolve_framework
from hsx_dist.reading.statistics import read_statistics

if TYPE_CHECKING:
    from hsx_dist.reading.datasets import HiddenStatesDataset

Scaling = Literal["norm", "standard"]
#: Smallest normal float32. A smaller spread counts as 0; the reciprocal of this number is still finite.
_TINY = float(np.finfo(np.float32).tiny)


class Scaler:
    """Turns stored rows into a batch of ``TokenBatches``: ``[B, H]`` or ``[B, L, H]``.

    ``DataLoader`` pickles it with its data set for workers that are not forked.
    """

    def __init__(self, dataset: HiddenStatesDataset, scaling: Scaling | None, dtype: Any, device: Any) -> None:
        """Read the statistics that ``scaling`` needs.

        Raises:
            ConfigError: ``scaling`` is unknown. The run has no statistics of a layer, or does not list its layers.
                Numpy was given a device. The framework does not know ``dtype`` or ``device``.
        """
        if scaling is not None and scaling not in get_args(Scaling):
            raise ConfigError(f"scaling: expected 'norm', 'standard' or None, got {scaling!r}")
        self._torch = resolve_framework(dataset.framework) == "torch"
        if device is not None and not self._torch:
            raise ConfigError(f"device: expected none for numpy arrays, got {device!r}. Use framework='torch'")
        _check(dtype, device, self._torch)
        self._dtype, self._device = dtype, device
        self._states = tuple(dataset.states)
        self._lines = {} if scaling is None else {name: _line(dataset, name, scaling) for name in self._states}
        # Filled at the first batch, because the data set exists before DataLoader's workers.
        self._on_device: dict[str, Any] = {}

    @property
    def factors(self) -> str:
        """A hash of the factors, "" without ``scaling``. A resume compares it."""
        lines = b"".join(a.tobytes() for line in self._lines.values() for a in line)
        return hashlib.sha256(lines).hexdigest()[:32] if self._lines else ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_device": {}}

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        if not self._lines and self._dtype is None and self._device is None:
            return rows
        finish = self._finish if self._torch else self._finish_numpy
        return {name: finish(name, x) for name, x in rows.items()}

    def _finish_numpy(self, name: str, x: Any) -> Any:
        if name not in self._states:
            return x
        x = _scaled(x.astype(np.float32), *self._lines[name]) if self._lines else x
        return x if self._dtype is None or x.dtype == np.int32 else x.astype(self._dtype)

    def _finish(self, name: str, x: Any) -> Any:
        import torch

        x = x.to(self._device)
        if name not in self._states:
            return x
        if self._lines:
            if name not in self._on_device:
                self._on_device[name] = [torch.from_numpy(a).to(x.device) for a in self._lines[name]]
            x = _scaled(x.float(), *self._on_device[name])
        return x.to(self._dtype) if self._dtype is not None and x.is_floating_point() else x


def _check(dtype: Any, device: Any, torch_wanted: bool) -> None:
    """Raise ``ConfigError`` if ``dtype`` or ``device`` is none of the framework's."""
    if not torch_wanted:
        try:
            np.dtype(dtype)
        except TypeError as e:
            raise ConfigError(f"dtype: expected one of numpy's, got {dtype!r:.100}. Use numpy.float16") from e
        return
    import torch

    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype: expected one of torch's, got {dtype!r:.100}. Use torch.float16")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as e:
        raise ConfigError(f"device: expected one of torch's, got {device!r:.100}. Use 'cpu' or 'cuda'") from e


def _scaled(x: Any, shift: Any, factor: Any) -> Any:
    """Scale ``x``, float32 ``[B, …, H]``, or ``[B, …, heads, dim]`` if its rows consist of heads."""
    rows = x.reshape(len(x), *shift.shape[:-1], -1)
    if shift.shape[-1] not in (1, rows.shape[-1]):
        raise FormatError(
            f"scaling: expected statistics of {rows.shape[-1]} channels, got those of {shift.shape[-1]}. Run `hsx "
            "stats` again"
        )
    return ((rows - shift) * factor).reshape(x.shape)


def _line(
    dataset: HiddenStatesDataset, point: str, scaling: Scaling
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(shift, factor), float32, which broadcast over ``[B, H]``, or over ``[B, L, H]`` for several layers."""
    layers = dataset.layers_of(point)
    if not layers:
        raise ConfigError(
            f"scaling: expected the layers of {point}, got a run.json that does not list them. Name them: "
            "HiddenStatesDataset(…, layers=[…])"
        )
    found = read_statistics(dataset.run, layers, point=point)
    option = "" if point == HIDDEN_STATES else f" --points {point}"
    if missing := sorted(set(layers) - set(found.layers)):
        raise ConfigError(
            f"scaling: expected statistics of {point} at layers {list(layers)}, got none of {missing}. Run "
            f"`hsx stats {dataset.run.url}{option} --layers {','.join(map(str, layers))}`"
        )
    rows = [found.layers[layer] for layer in layers]
    if scaling == "norm":
        shift = np.zeros((len(rows), 1))
        factor = np.array([[row.norm_factor] for row in rows])
    else:
        if len(widths := sorted({len(row.mean) for row in rows})) > 1:
            raise FormatError(
                f"scaling: expected statistics of {point} of one length, got those of {widths} channels. Run `hsx "
                "stats` again"
            )
        shift = np.stack([row.mean for row in rows])
        spread = np.sqrt(np.stack([row.variance for row in rows]))
        factor = np.divide(1.0, spread, out=np.ones_like(spread), where=spread > _TINY)  # a constant channel stays 0
    one = len(rows) == 1
    return (shift[0] if one else shift).astype(np.float32), (factor[0] if one else factor).astype(np.float32)
