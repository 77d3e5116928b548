"""Make batches of items, padded or packed. Functions for ``DataLoader``'s ``collate_fn``.

Items are those of ``HiddenStatesDataset`` (torch tensors), also with other names or further arrays. Arrays as long as
``input_ids`` have a row for each token, and are padded or packed. ``layer_ids`` is kept once. Other values become
lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.text import head

Item = Mapping[str, Any]


def pad(
    items: Sequence[Item], *, ids: str = "input_ids", multiple: int = 1, length: int | None = None, pad_id: int = 0
) -> dict[str, Any]:
    """Make each item a row: ``[T, …]`` becomes ``[B, S, …]``, padded at the end with zeros (ids with ``pad_id``).

    Args:
        ids: the name of the token ids.
        multiple: round S up to a multiple of this number.
        length: S, in place of the longest item's length. Longer items are cut.
        pad_id: id for padding.

    Returns:
        The items' arrays by name, ``attention_mask`` bool ``[B, S]`` and ``lengths`` int64 ``[B]``.

    Raises:
        ConfigError: items differ in their names or layers, or their rows in dtype or shape. Or they have a name that
            the batch adds.

    Example:
        >>> from hsx_dist.reading.collate import pad
        >>> items = list(HiddenStatesDataset("runs/demo", layers=[15]))
        >>> pad(items, multiple=16)["hidden_states"].shape
        torch.Size([3, 32, 1, 576])
    """
    import torch

    lengths = [len(item[ids]) for item in _same(items, "lengths", "attention_mask")]
    size = length if length is not None else -(-max(lengths) // multiple) * multiple
    lengths = [min(n, size) for n in lengths]
    batch: dict[str, Any] = {}
    per_token = _per_token(items, ids)
    for name in items[0]:
        if name not in per_token:
            batch[name] = _once_or_list(items, name)
            continue
        first = items[0][name]
        out = first.new_full((len(items), size, *first.shape[1:]), pad_id if name == ids else 0)
        for row, (item, n) in enumerate(zip(items, lengths, strict=True)):
            out[row, :n] = item[name][:n]
        batch[name] = out
    batch["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    batch["attention_mask"] = torch.arange(size)[None] < batch["lengths"][:, None]
    return batch


def pack(items: Sequence[Item], *, ids: str = "input_ids", length: int | None = None) -> dict[str, Any]:
    """Concatenate all items into one row: ``[T, …]`` becomes ``[1, sum T, …]``.

    Args:
        ids: the name of the token ids.
        length: the row's length. Longer rows are cut, shorter ones padded with zeros (as in speculators and SpecForge).

    Returns:
        The items' arrays by name, and four more.

        - ``position_ids``: int64 ``[1, S]``, from 0 in each item.
        - ``document_ids``: int64 ``[1, S]``, the number of the item; -1 at padding.
        - ``cu_seqlens``: int32 ``[B + 1]``, as for FlashAttention.
        - ``lengths``: int64 ``[B]``.

    Raises:
        ConfigError: items differ in their names or layers, or their rows in dtype or shape. Or they have a name that
            the batch adds.

    Example:
        >>> from hsx_dist.reading.collate import pack
        >>> items = list(HiddenStatesDataset("runs/demo", layers=[15]))
        >>> pack(items)["cu_seqlens"]
        tensor([ 0, 20, 42, 66], dtype=torch.int32)
    """
    import torch

    lengths, left = [], length
    for item in _same(items, "lengths", "cu_seqlens", "document_ids", "position_ids"):
        n = len(item[ids]) if left is None else min(len(item[ids]), left)
        lengths.append(n)
        left = None if left is None else left - n
    total = sum(lengths)
    size = total if length is None else length
    batch: dict[str, Any] = {}
    per_token = _per_token(items, ids)
    for name in items[0]:
        if name not in per_token:
            batch[name] = _once_or_list(items, name)
            continue
        first = items[0][name]
        out = first.new_zeros((1, size, *first.shape[1:]))
        at = 0
        for item, n in zip(items, lengths, strict=True):
            out[0, at : at + n] = item[name][:n]
            at += n
        batch[name] = out
    counts = torch.tensor(lengths, dtype=torch.int64)
    batch["lengths"] = counts
    batch["cu_seqlens"] = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    padding = torch.full((size - total,), -1)
    batch["document_ids"] = torch.cat([torch.arange(len(items)).repeat_interleave(counts), padding])[None]
    positions = [torch.arange(n) for n in lengths]
    batch["position_ids"] = torch.cat([*positions, torch.zeros(size - total, dtype=torch.int64)])[None]
    return batch


def _head(value: object) -> str:
    return head(str(value), 200)


def _same(items: Sequence[Item], *added: str) -> Sequence[Item]:
    """Return the items. Raises ``ConfigError`` if they differ in names, or have a name that the batch adds."""
    if not items:
        raise ConfigError("items: expected at least one item for a batch, got none")
    names = set(items[0])
    for item in items:
        if set(item) != names:
            raise ConfigError(
                f"items: expected the same names in all, got {_head(sorted(names))} and {_head(sorted(item))}. Use one "
                "data set"
            )
    if taken := names & set(added):
        raise ConfigError(
            f"items: expected no array with the name of a batch's own member, got {', '.join(sorted(taken))}. Rename "
            "it in the data set (rename)"
        )
    return items


def _per_token(items: Sequence[Item], ids: str) -> list[str]:
    """The names of arrays with a row for each token. Raises ``ConfigError`` if the items' rows differ.

    Called before a batch is allocated, because it takes the row of one item times the tokens of others.
    """
    found = []
    for name in items[0].keys() - {"layer_ids", "key"}:
        arrays = [item[name] for item in items]
        if not all(getattr(x, "ndim", 0) >= 1 and len(x) == len(i[ids]) for x, i in zip(arrays, items, strict=True)):
            continue
        found.append(name)
        first = arrays[0]
        for x in arrays:
            if (x.dtype, x.shape[1:]) != (first.dtype, first.shape[1:]):
                raise ConfigError(
                    f"{name}: expected rows of {first.dtype} {tuple(first.shape[1:])} in all items, got {x.dtype} "
                    f"{tuple(x.shape[1:])}. Pass layers=[…] to the data set, or leave the array out of rename"
                )
    return found


def _once_or_list(items: Sequence[Item], name: str) -> Any:
    values = [item[name] for item in items]
    if name != "layer_ids":
        return values
    if any(v.tolist() != values[0].tolist() for v in values):
        raise ConfigError(
            f"layer_ids: expected the same layers in all items, got {_head([v.tolist() for v in values[:4]])}. Pass "
            "layers=[…] to the data set"
        )
    return values[0]
