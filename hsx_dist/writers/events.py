"""What writers tell of segments: that they are durable, or that they never will be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hsx_dist.format.manifest import Receipt
from hsx_dist.observe.metrics import Series
from hsx_dist.page import Segment


@dataclass(frozen=True, slots=True)
class Lost:
    """Segments that will never be durable, and why. ``fatal``: no later part can succeed either."""

    segments: tuple[Segment, ...]
    reason: str
    fatal: bool = False
    #: The attempt was fenced off: not a fault, but the end of this attempt.
    fenced: bool = False
    #: The key stands for another sample already: what is stored under it is not what was lost.
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """What a writer has counted since it last said so: for the totals that stand in the run."""

    numbers: Mapping[Series, float]


@dataclass(frozen=True, slots=True)
class Stored:
    """Segments that are durable where there is no run, and so no receipt: in the object ``part``, of their own."""

    segments: tuple[Segment, ...]
    part: str


#: What a sink tells: proof of a stored part (without a run: that it is stored), or that segments were lost.
Event = Receipt | Stored | Lost
