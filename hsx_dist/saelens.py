"""A run as SAELens' data provider: batches for ``SAETrainer`` and ``MultiSAETrainer``, and an SAE's configuration.

SAELens names a residual stream *before* a block (``hook_resid_pre``) or *after* it (``hook_resid_post``):
``blocks.K.hook_resid_pre`` is layer K, ``blocks.K.hook_resid_post`` is layer K+1. Other hooks, such as
``blocks.K.hook_mlp_out`` and ``blocks.K.attn.hook_z``, are points of the model. Their values are those of
TransformerLens for a model loaded without processing (``from_pretrained_no_processing``).

Batches are as stored: SAELens normalises (``normalize_activations``). With ``scaling="norm"`` they are scaled as by its
``expected_average_only_in``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.layers import point_of_hook
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.run import Run, open_run
from hsx_dist.reading.token_batches import TokenBatches


class DataProvider(Iterator[Any]):
    """The iterator that ``data_provider`` returns: batches of a ``TokenBatches`` by hook names, and their position.

    Example:
        >>> from hsx_dist.saelens import data_provider
        >>> hooks = ["blocks.2.hook_resid_pre", "blocks.14.hook_resid_post"]
        >>> provider = data_provider("runs/demo", hooks, batch_tokens=16, buffer_tokens=64)
        >>> {hook: rows.shape for hook, rows in next(provider).items()}
        {'blocks.2.hook_resid_pre': torch.Size([16, 576]), 'blocks.14.hook_resid_post': torch.Size([16, 576])}
    """

    def __init__(
        self, batches: TokenBatches, hook: str | None, places: Mapping[str, tuple[str, int]], layers: Sequence[int]
    ):
        self._batches, self._hook, self._places, self._layers = batches, hook, places, layers
        self._iterator: Iterator[dict[str, Any]] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:  # not earlier, so that a state can be loaded
            self._iterator = iter(self._batches)
        batch = next(self._iterator)
        if self._hook is not None:
            return _rows(batch, *self._places[self._hook], self._layers)
        return {name: _rows(batch, *place, self._layers) for name, place in self._places.items()}

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch; JSON types. As ``TokenBatches.state_dict``.

        Example:
            >>> state = provider.state_dict()
        """
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next batch the one after ``state``. Raises as ``TokenBatches.load_state_dict``.

        Example:
            >>> provider.load_state_dict(state)
        """
        self._batches.load_state_dict(state)
        self._iterator = None


def data_provider(
    run: Run | str,
    hooks: str | Sequence[str],
    batch_tokens: int,
    *,
    data: Mapping[str, Any] | None = None,
    **mixing: Any,
) -> DataProvider:
    """Batches of activations without end: ``[B, H]`` float32 for one hook, ``{hook: [B, H]}`` for several.

    The result is an iterator with ``state_dict`` and ``load_state_dict``: store its state with each checkpoint.

    Args:
        run: an open run, its path or URL.
        hooks: one name for ``SAETrainer``, a sequence for ``MultiSAETrainer``.
        batch_tokens: B, the trainer's ``train_batch_size_samples``.
        data: arguments of ``HiddenStatesDataset``, such as ``tokens=slice(1, None)``. Shuffled and repeated by default.
        mixing: arguments of ``TokenBatches``, such as ``buffer_tokens``, ``exclude_ids`` or ``device``.

    Raises:
        ConfigError: a hook is no point, or not in the run; the points of the hooks have different layers.
        RunError, StoreError: as ``open_run``.

    Example:
        >>> from hsx_dist.saelens import data_provider
        >>> batches = data_provider("runs/demo", "blocks.15.hook_resid_pre", batch_tokens=16, buffer_tokens=64)
        >>> batch = next(batches)
        >>> batch.shape, batch.dtype
        (torch.Size([16, 576]), torch.float32)
    """
    import torch

    names = [hooks] if isinstance(hooks, str) else list(hooks)
    places = {name: point_of_hook(name) for name in names}
    options = {"shuffle": True, "repeat": True, "loss_mask": "off", **(data or {})}
    options["loss_mask"] = "ones" if mixing.get("only_loss") else options["loss_mask"]
    points, layers = _wanted(run, list(places.values()))
    dataset = HiddenStatesDataset(run, points=points, layers=layers, framework="torch", **options)
    batches = TokenBatches(dataset, batch_tokens, drop_last=True, **{"dtype": torch.float32, **mixing})
    return DataProvider(batches, hooks if isinstance(hooks, str) else None, places, layers)


def _wanted(run: Run | str, places: Sequence[tuple[str, int]]) -> tuple[list[str] | None, list[int]]:
    """Return the points (None: hidden states) and layers that a data set must read.

    Raises:
        ConfigError: the run lacks a layer, or the points have different layers, which a data set cannot read.
    """
    layers = list(dict.fromkeys(layer for _, layer in places))
    points = list(dict.fromkeys(point for point, _ in places))
    if points == [HIDDEN_STATES]:
        return None, layers
    if set(places) != {(point, layer) for point in points for layer in layers}:
        raise ConfigError(
            f"hooks: expected the same layers of each point, got {', '.join(f'{p} {i}' for p, i in places)}. Name "
            "other hooks, or make a provider for each"
        )
    opened = open_run(run) if isinstance(run, str) else run
    for point in points:
        if lacking := sorted(set(layers) - set(opened.layers_of(point))):
            raise ConfigError(f"{opened.url}: expected layers {lacking} of {point}, got a run without. Extract them")
    return points, layers


def _rows(batch: Mapping[str, Any], point: str, layer: int, layers: Sequence[int]) -> Any:
    """Return the rows ``[B, width]``, with heads concatenated as in SAELens."""
    rows = batch[point] if len(layers) == 1 else batch[point][:, layers.index(layer)]
    return rows.flatten(1)


def sae_config(run: Run | str, hook: str) -> dict[str, Any]:
    """Return the run's facts for an SAE: ``d_in``, and ``metadata`` for ``SAEMetadata(**…)``.

    Args:
        run: an open run, its path or URL.
        hook: a name of SAELens, such as ``blocks.14.hook_resid_post``.

    Raises:
        ConfigError: the hook is no point, or the run's samples lack it.
        RunError, StoreError: as ``open_run``.

    Example:
        >>> from hsx_dist.saelens import sae_config
        >>> sae_config("runs/demo", "blocks.14.hook_resid_post")["d_in"]
        576
    """
    point, layer = point_of_hook(hook)
    run = open_run(run) if isinstance(run, str) else run
    found = run.at(0).points if len(run) else {}
    stored = list(found[point].layers) if point in found else []
    if layer not in stored:
        raise ConfigError(
            f"{run.url}: expected layer {layer} of {point} ({hook}), got {stored}. Extract it, or name another hook"
        )
    about = {"model_name": run.info.get("meaning", {}).get("model"), "hook_name": hook}
    return {"d_in": found[point].width, "metadata": about}
