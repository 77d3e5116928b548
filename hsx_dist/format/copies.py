"""Which of a key's segments form its sample. Adding a segment takes constant time, however many were added before."""

from __future__ import annotations

from collections.abc import Callable

#: Shared by all segments of a sample: its number of tokens, its number of columns, and the hash of the ids.
Identity = tuple[int, int, bytes]
#: The part and slot of a place.
PlaceOf = Callable[[int], tuple[str, int]]
#: The last token and the token hash of the segment at a place.
EndOf = Callable[[int], tuple[int, bytes]]
#: Bits of a segment's first token in a name of ``_Attempt._chosen``: it is at most ``MAX_TOKENS``.
_START_BITS = 41


class Copies:
    """The segments of one key. ``added``: for the caller's use, how many segments of its list were added.

    A segment takes about 150 bytes, and about 1.1 KB if no other segment has its identity. A receipt of a few KiB,
    compressed, may have a million segments of one key and identity. Different hashes make it larger.
    """

    def __init__(self, place_of: PlaceOf, end_of: EndOf) -> None:
        self.added = 0
        self._of = place_of, end_of
        self._attempts: dict[int, _Attempt] = {}
        self._whole: set[int] = set()
        self._disputed: set[int] = set()

    def add(self, place: int, attempt: int, identity: Identity, column: int, index: int, start: int) -> None:
        """Add the segment that an attempt proves at ``place``."""
        found = self._attempts.get(attempt)
        if found is None:
            found = self._attempts[attempt] = _Attempt(*self._of)
        found.add(place, identity, column, index, start)
        (self._whole.add if found.whole else self._whole.discard)(attempt)
        if found.disputed:
            self._disputed.add(attempt)

    def sample(self) -> list[int]:
        """Where the newest attempt that proves the whole sample stored its segments. Empty if no attempt does."""
        return self._attempts[max(self._whole)].sample() if self._whole else []

    def disputed(self) -> set[int]:
        """The attempts that stored the key with different tokens, except those older than the attempt of ``sample``."""
        if not self._whole:
            return self._disputed
        used = max(self._whole)
        return {attempt for attempt in self._disputed if attempt >= used}


class _Attempt:
    """The segments of one key that one attempt proves. Only segments with equal identity form a sample."""

    def __init__(self, place_of: PlaceOf, end_of: EndOf) -> None:
        self._place_of, self._end_of = place_of, end_of
        #: By identity and column; then by index and start, in one number: the place with the lowest part name.
        self._chosen: dict[tuple[Identity, int], dict[int, int]] = {}
        #: By identity and column: the number of consecutive segments from the first token on, and their end.
        self._ends: dict[tuple[Identity, int], tuple[int, int]] = {}
        #: By identity: the columns whose segments cover all tokens.
        self._covered: dict[Identity, set[int]] = {}
        #: Whether two segments of the same place differ in their tokens.
        self._mixed = False
        self.whole: set[Identity] = set()

    @property
    def disputed(self) -> bool:
        return self._mixed or len(self._covered) > 1

    def add(self, place: int, identity: Identity, column: int, index: int, start: int) -> None:
        chosen = self._chosen.setdefault((identity, column), {})
        name = index << _START_BITS | start
        first = chosen.setdefault(name, place)
        if first != place:
            if self._place_of(place) < self._place_of(first):
                chosen[name] = place
            if not self._mixed and self._end_of(first) != self._end_of(place):
                self._mixed = True
                for known, other in self._ends:
                    self._cover(known, other)
        count, end = self._ends.get((identity, column), (0, 0))
        while (following := chosen.get(count << _START_BITS | end)) is not None:
            count, end = count + 1, self._end_of(following)[0]
        self._ends[identity, column] = count, end
        self._cover(identity, column)

    def _cover(self, identity: Identity, column: int) -> None:
        """Note whether a column covers all tokens, and with it whether the sample is whole."""
        covered = self._covered.setdefault(identity, set())
        (covered.add if self._is_covered(identity, column) else covered.discard)(column)
        (self.whole.add if len(covered) == identity[1] else self.whole.discard)(identity)

    def _is_covered(self, identity: Identity, column: int) -> bool:
        if not self._mixed:
            return self._ends[identity, column][1] == identity[0]
        # The whole sample's hash may be unknown (empty), so segments with different tokens can have equal identities.
        # In a mixed attempt only a single segment that covers the column counts.
        first = self._chosen[identity, column].get(0)
        return first is not None and self._end_of(first)[0] == identity[0]

    def sample(self) -> list[int]:
        """The places of a whole sample's segments, column by column. Of several samples, the one with the lowest name
        of the first segment's part is chosen."""
        identity = min(sorted(self.whole), key=lambda known: self._place_of(self._chosen[known, 0][0])[0])
        return [place for column in range(identity[1]) for place in self._column(identity, column)]

    def _column(self, identity: Identity, column: int) -> list[int]:
        chosen, places, end = self._chosen[identity, column], list[int](), 0
        while end < identity[0]:
            place = chosen[len(places) << _START_BITS | end]
            places.append(place)
            end = self._end_of(place)[0]
        return places
