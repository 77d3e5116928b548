"""A run as SAELens' data provider: batches for ``SAETrainer`` and ``MultiSAETrainer``, and an SAE's configuration.

SAELens names a residual stream *before* a block (``hook_resid_pre``) or *after* it (``hook_resid_post``):
``blocks.K.hook_resid_pre`` is layer K, ``blocks.K.hook_resid_post`` is layer K+1. They are read from ``hidden_states``,
or from ``resid_pre`` and ``resid_final``. Other hooks, such as ``blocks.K.hook_mlp_out`` and ``blocks.K.attn.hook_z``,
are points of the model. Their values are those of TransformerLens for a model loaded without processing
(``from_pretrained_no_processing``).

Batches have the stored values: SAELens normalises them (``normalize_activations``). With ``scaling="norm"`` batches are
scaled as SAELens' ``expected_average_only_in`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hsx_dist.layers import point_of_hook
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.hooks import hook_place
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
        self,
        batches: TokenBatches,
        hook: str | None,
        places: Mapping[str, tuple[str, int]],
        layers: Mapping[str, Sequence[int]],
    ):
        self._batches, self._hook, self._places, self._layers = batches, hook, places, layers
        self._iterator: Iterator[dict[str, Any]] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:  # created here, so that ``load_state_dict`` can be called before
            self._iterator = iter(self._batches)
        batch = next(self._iterator)
        if self._hook is not None:
            return _rows(batch, *self._places[self._hook], self._layers)
        return {name: _rows(batch, *place, self._layers) for name, place in self._places.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, in JSON types. See ``TokenBatches.state_dict``.

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
    """Return endless batches of activations: ``[B, H]`` float32 for one hook, ``{hook: [B, H]}`` for several.

    The result is an iterator with ``state_dict`` and ``load_state_dict``: store its state with each checkpoint.

    Args:
        run: an open run, its path or URL.
        hooks: one name for ``SAETrainer``, a sequence for ``MultiSAETrainer``.
        batch_tokens: B, the trainer's ``train_batch_size_samples``.
        data: arguments of ``HiddenStatesDataset``, such as ``tokens=slice(1, None)``. Shuffled and repeated by default.
        mixing: arguments of ``TokenBatches``, such as ``buffer_tokens``, ``exclude_ids`` or ``device``.

    Raises:
        ConfigError: a hook names no point, or the run lacks it.
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
    options = {"shuffle": True, "repeat": True, "loss_mask": "off", **(data or {})}
    options["loss_mask"] = "ones" if mixing.get("only_loss") else options["loss_mask"]
    if isinstance(run, str):
        run = open_run(run, storage_options=options.pop("storage_options", None))
    # With ``follow`` a run may have no sample yet.
    places = {name: hook_place(run, name) if len(run) else point_of_hook(name) for name in names}
    layers: dict[str, list[int]] = {}
    for point, layer in dict.fromkeys(places.values()):
        layers.setdefault(point, []).append(layer)
    points = None if layers.keys() == {HIDDEN_STATES} else list(layers)
    dataset = HiddenStatesDataset(run, points=points, layers=layers, framework="torch", **options)
    batches = TokenBatches(dataset, batch_tokens, drop_last=True, **{"dtype": torch.float32, **mixing})
    return DataProvider(batches, hooks if isinstance(hooks, str) else None, places, layers)


def _rows(batch: Mapping[str, Any], point: str, layer: int, layers: Mapping[str, Sequence[int]]) -> Any:
    """Return the rows ``[B, width]``, with heads concatenated as in SAELens."""
    of = layers[point]
    rows = batch[point] if len(of) == 1 else batch[point][:, of.index(layer)]
    return rows.flatten(1)


def sae_config(run: Run | str, hook: str) -> dict[str, Any]:
    """Return the run's facts for an SAE: ``d_in``, and ``metadata`` for ``SAEMetadata(**…)``.

    Args:
        run: an open run, its path or URL.
        hook: a name of SAELens, such as ``blocks.14.hook_resid_post``.

    Raises:
        ConfigError: the hook names no point, or the run's samples lack it.
        RunError, StoreError: as ``open_run``.

    Example:
        >>> from hsx_dist.saelens import sae_config
        >>> sae_config("runs/demo", "blocks.14.hook_resid_post")["d_in"]
        576
    """
    run = open_run(run) if isinstance(run, str) else run
    point, _ = hook_place(run, hook)
    about = {"model_name": run.info.get("meaning", {}).get("model"), "hook_name": hook}
    return {"d_in": run.at(0).points[point].width, "metadata": about}
