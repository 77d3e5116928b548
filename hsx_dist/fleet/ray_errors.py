"""What Ray's errors say of ours."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError

from hsx_dist.errors import HsxError


def went_with_its_node(error: RayError) -> bool:
    """Whether an actor's death is its node's, by what Ray says of it."""
    return bool(getattr(error, "preempted", False)) or "node has died" in str(error) or "node was drained" in str(error)


def reason_of(error: RayError) -> str:
    """A line that says why an actor or its task failed: our own error where one of ours is the cause."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HsxError):
        return str(cause)
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("hsx_dist.errors.")]
        return ours[-1].partition(": ")[2] if ours else lines[0]
    return str(error).strip().splitlines()[-1]
