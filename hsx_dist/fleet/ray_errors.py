"""Causes of failures, from Ray's errors."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError

from hsx_dist.errors import HsxError


def went_with_its_node(error: RayError) -> bool:
    """Whether an actor died with its node, according to Ray's error."""
    return bool(getattr(error, "preempted", False)) or "node has died" in str(error) or "node was drained" in str(error)


def reason_of(error: RayError) -> str:
    """Return one line with the cause of a failed actor or task: this package's error if there is one, else Ray's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HsxError):
        return str(cause)
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("hsx_dist.errors.")]
        return ours[-1].partition(": ")[2] if ours else lines[0]
    return str(error).strip().splitlines()[-1]
