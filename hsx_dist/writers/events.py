"""Events of writers: segments that are durable, and segments that are lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hsx_dist.errors import SampleExpired
from hsx_dist.format.manifest import Receipt
from hsx_dist.observe.metrics import Series
from hsx_dist.page import Segment
from hsx_dist.text import bounded, shown_error


@dataclass(frozen=True, slots=True)
class Lost:
    """Segments that will never be durable, and the reason. ``fatal``: no later part can succeed either."""

    segments: tuple[Segment, ...]
    reason: str
    fatal: bool = False
    #: A newer attempt fenced this one off. This ends the attempt and is no fault.
    fenced: bool = False
    #: The key belongs to another sample: the object stored under it is not the lost one.
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """The writer could not open the run's store, and stores nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counted:
    """A writer's counts since its last report, for the totals stored in the run."""

    numbers: Mapping[Series, float]


@dataclass(frozen=True, slots=True)
class Stored:
    """Segments that are durable without a run, and so without a receipt, in the separate object ``part``."""

    segments: tuple[Segment, ...]
    part: str


#: An event of a sink: the proof of a stored part (``Stored`` without a run), or lost segments.
Event = Receipt | Stored | Lost


def reason_not_stored(error: Exception, *, for_clients: bool) -> str:
    """Return why a part was not stored. ``for_clients``: a server's clients read the reason in a failure marker.

    The text of an error can name the store's addresses and the object's place. Clients get only the class.
    """
    if for_clients and isinstance(error, SampleExpired):
        return "the key's object has expired and cannot be renewed. Delete it, or use another key"
    kind = type(error).__name__
    if for_clients:
        return f"{kind}: the sample could not be stored. The server's log has the error"
    return bounded(shown_error(error))
