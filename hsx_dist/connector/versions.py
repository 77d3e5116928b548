"""Differences between vLLM releases that affect the connector. No other module of this package depends on a version.

Read from the source of the released packages, and checked for the tested ones (``make matrix``):

====== ================================================== =======================
vLLM   axes of the hidden-state cache's view              ``has_pending_block_frees``
====== ================================================== =======================
0.28   ``[blocks, block_size, layers, hidden]``           not called
0.29   ``[blocks, layers, block_size, hidden]``           not called
0.30   ``[blocks, layers, block_size, hidden]``           called every step
====== ================================================== =======================

The axes changed with vLLM's pull request 51718. Between 0.31 and 0.32 nothing that the connector uses differs: the
additions to its base class (the tier of external cache hits, the groups that a load restores) concern loading.
In 0.33 the V2 model runner asks for the results before the drafter runs, as V1 does, and a connector class declares
whether it supports sleep mode (default: yes).
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from hsx_dist.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: First and last minor release that ``make matrix`` runs.
TESTED = ((0, 31), (0, 33))
#: Oldest supported release. Before it, the scheduler does not ask whether held blocks will be freed. With a slow store
#: it then preempts running requests, or schedules nothing.
OLDEST = (0, 30)
#: Before this release, the view's second axis is the block's tokens and its third axis the layers.
LAYERS_FIRST_SINCE = (0, 29)


class UntestedVllm(UserWarning):
    """The connector was not tested with the installed vLLM."""


def minor_release(version: str) -> tuple[int, int] | None:
    """Return ``(0, 32)`` for ``"0.32.1+cpu"``; None for a build without a release number (``"dev"``).

    A source build without tags has the version ``0.1.dev…``, which is no release number either.
    """
    found = re.match(r"(\d+)\.(\d+)(.*)", version)
    if found is None:
        return None
    release = int(found[1]), int(found[2])
    return None if release == (0, 1) and found[3].startswith(".dev") else release


def check_version(version: str) -> None:
    """Refuse a vLLM release that does not work, and warn (``UntestedVllm``) about an untested one.

    Raises:
        ConfigError: the release is older than ``OLDEST``.
    """
    first, last = ("{}.{}".format(*release) for release in TESTED)
    release = minor_release(version)
    if release is not None and release < OLDEST:
        raise ConfigError(
            f"HiddenStatesConnector: expected vLLM {OLDEST[0]}.{OLDEST[1]} or newer (tested: {first} to {last}), got "
            f"{version}. Its scheduler does not ask a connector whether blocks will be freed. With a slow store it "
            f"preempts requests or schedules none. Install vLLM {last}"
        )
    if release is None or not TESTED[0] <= release <= TESTED[1]:
        warnings.warn(
            f"HiddenStatesConnector: expected vLLM {first} to {last} (tested), got {version}. Compare a few samples "
            f"with another source before you rely on it, or install vLLM {last}",
            UntestedVllm,
            stacklevel=2,
        )


def layers_first(cache: torch.Tensor, num_layers: int, block_size: int, version: str) -> torch.Tensor:
    """Return a view of the cache as ``[blocks, layers, block_size, hidden]``, for either axis order. Copies nothing.

    Args:
        cache: as vLLM registers it, with ``num_layers`` captured layers in blocks of ``block_size`` tokens.
        version: vLLM's version, which decides only if ``num_layers`` equals ``block_size``.

    Raises:
        ConfigError: the shape is neither of the two.
    """
    as_now = cache.ndim == 4 and tuple(cache.shape[1:3]) == (num_layers, block_size)
    as_before = cache.ndim == 4 and tuple(cache.shape[1:3]) == (block_size, num_layers)
    if as_now and as_before:
        release = minor_release(version)
        as_now = release is None or release >= LAYERS_FIRST_SINCE
    if as_now:
        return cache
    if as_before:
        return cache.transpose(1, 2)
    raise ConfigError(
        f"hidden-state cache: expected [blocks, {num_layers}, {block_size}, hidden] or [blocks, {block_size}, "
        f"{num_layers}, hidden], got {tuple(cache.shape)} from vLLM {version}. "
        "Install a tested vLLM: {}.{} to {}.{}".format(*TESTED[0], *TESTED[1])
    )
