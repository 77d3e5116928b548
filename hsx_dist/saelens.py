"""A run as SAELens' data provider: batches for ``SAETrainer`` and ``MultiSAETrainer``, and an SAE's configuration.

SAELens counts a residual stream *before* a block (``hook_resid_pre``) or *after* it (``hook_resid_post``):
``blocks.K.hook_resid_post`` is layer K+1, ``blocks.K.hook_resid_pre`` is layer K. Batches are as stored: SAELens
normalises (``normalize_activations``). With ``scaling="norm"`` they are what its ``expected_average_only_in`` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.layers import layer_of_hook
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.run import Run
from hsx_dist.reading.token_batches import TokenBatches


def data_provider(
    run: Run | str,
    hooks: str | Sequence[str],
    batch_tokens: int,
    *,
    data: Mapping[str, Any] | None = None,
    **mixing: Any,
) -> Iterator[Any]:
    """Endless batches of activations: ``[B, H]`` float32 for one hook, ``{hook: [B, H]}`` for several.

    Args:
        run: an open run, its path or URL.
        hooks: one name for ``SAETrainer``, a sequence for ``MultiSAETrainer``.
        batch_tokens: B, the trainer's ``train_batch_size_samples``.
        data: arguments of ``HiddenStatesDataset``, such as ``tokens=slice(1, None)``. Shuffled and repeated by default.
        mixing: arguments of ``TokenBatches``, such as ``buffer_tokens``, ``exclude_ids`` or ``device``.

    Raises:
        ConfigError: a hook is no layer, or not in the run.
    """
    import torch

    names = [hooks] if isinstance(hooks, str) else list(hooks)
    options = {"shuffle": True, "repeat": True, "loss_mask": "off", **(data or {})}
    options["loss_mask"] = "ones" if mixing.get("only_loss") else options["loss_mask"]
    dataset = HiddenStatesDataset(run, layers=[layer_of_hook(name) for name in names], framework="torch", **options)
    batches = TokenBatches(dataset, batch_tokens, drop_last=True, **{"dtype": torch.float32, **mixing})
    if isinstance(hooks, str):
        return (batch["hidden_states"] for batch in batches)
    if len(names) == 1:
        return ({names[0]: batch["hidden_states"]} for batch in batches)
    return _by_hook(batches, names)


def _by_hook(batches: Iterable[Mapping[str, Any]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield {name: batch["hidden_states"][:, k] for k, name in enumerate(names)}


def sae_config(run: Run, hook: str) -> dict[str, Any]:
    """What an SAE must know of the run: ``d_in``, and ``metadata`` for ``SAEMetadata(**…)``.

    Raises:
        ConfigError: the hook is no layer, or the run has no sample of it.
    """
    layer = layer_of_hook(hook)
    if not len(run) or layer not in run.at(0).layer_ids:
        stored = list(run.at(0).layer_ids) if len(run) else []
        raise ConfigError(f"{run.url}: expected layer {layer} ({hook}), got {stored}. Extract it, or name another hook")
    about = {"model_name": run.info.get("meaning", {}).get("model"), "hook_name": hook}
    return {"d_in": run.at(0).hidden_size, "metadata": about}
