"""Which of a key's segments form its sample. Adding a segment takes constant time, however many were added before."""

from __future__ import annotations

from hsx_dist.format.segments import SegmentProof

#: Shared by all segments of a sample: its number of tokens, its number of columns, and the hash of the ids.
_Identity = tuple[int, int, str]


#: A place in a manifest, and the proof at that place.
_Proven = tuple[int, SegmentProof]


class Copies:
    """The segments of one key. ``added``: for the caller's use, how many segments of its list were added."""

    def __init__(self) -> None:
        self.added = 0
        self._attempts: dict[int, _Attempt] = {}
        self._whole: set[int] = set()
        self._disputed: set[int] = set()

    def add(self, place: int, attempt: int, proof: SegmentProof) -> None:
        """Add the segment that an attempt proves at ``place``."""
        found = self._attempts.setdefault(attempt, _Attempt())
        found.add(place, proof)
        (self._whole.add if found.whole else self._whole.discard)(attempt)
        if found.disputed:
            self._disputed.add(attempt)

    def sample(self) -> list[int]:
        """The places of the segments of the highest attempt that proves the whole sample; empty without one."""
        return self._attempts[max(self._whole)].sample() if self._whole else []

    def disputed(self) -> set[int]:
        """The attempts that stored the key with different tokens, except those older than the attempt of ``sample``."""
        if not self._whole:
            return self._disputed
        used = max(self._whole)
        return {attempt for attempt in self._disputed if attempt >= used}


class _Attempt:
    """The segments of one key that one attempt proves. Only segments with equal identity form a sample."""

    def __init__(self) -> None:
        #: By identity, column, index and start: the segment with the lowest part name.
        self._chosen: dict[tuple[_Identity, int, int, int], _Proven] = {}
        #: By identity and column: the number of consecutive segments from the first token on, and their end.
        self._ends: dict[tuple[_Identity, int], tuple[int, int]] = {}
        #: By identity: the columns whose segments cover all tokens.
        self._covered: dict[_Identity, set[int]] = {}
        #: Whether two segments of the same place differ in their tokens.
        self._mixed = False
        self.whole: set[_Identity] = set()

    @property
    def disputed(self) -> bool:
        return self._mixed or len(self._covered) > 1

    def add(self, place: int, proof: SegmentProof) -> None:
        s = proof.segment
        identity = (s.total, s.columns, proof.sample_hash)
        name = (identity, s.column, s.index, s.start)
        _, first = self._chosen.setdefault(name, (place, proof))
        if (proof.part, proof.slot) < (first.part, first.slot):
            self._chosen[name] = place, proof
        if (first.segment.stop, first.token_hash) != (s.stop, proof.token_hash) and not self._mixed:
            self._mixed = True
            for known, column in self._ends:
                self._cover(known, column)
        count, end = self._ends.get((identity, s.column), (0, 0))
        while (following := self._chosen.get((identity, s.column, count, end))) is not None:
            count, end = count + 1, following[1].segment.stop
        self._ends[identity, s.column] = count, end
        self._cover(identity, s.column)

    def _cover(self, identity: _Identity, column: int) -> None:
        """Note whether a column covers all tokens, and with it whether the sample is whole."""
        covered = self._covered.setdefault(identity, set())
        (covered.add if self._is_covered(identity, column) else covered.discard)(column)
        (self.whole.add if len(covered) == identity[1] else self.whole.discard)(identity)

    def _is_covered(self, identity: _Identity, column: int) -> bool:
        if not self._mixed:
            return self._ends[identity, column][1] == identity[0]
        # The whole sample's hash may be unknown (empty), so segments with different tokens can have equal identities.
        # In a mixed attempt only a single segment that covers the column counts.
        first = self._chosen.get((identity, column, 0, 0))
        return first is not None and first[1].segment.stop == identity[0]

    def sample(self) -> list[int]:
        """The places of a whole sample's segments, column by column. Of several samples, the one with the lowest name
        of the first segment's part is chosen."""
        identity = min(sorted(self.whole), key=lambda known: self._chosen[known, 0, 0, 0][1].part)
        return [place for column in range(identity[1]) for place in self._column(identity, column)]

    def _column(self, identity: _Identity, column: int) -> list[int]:
        places: list[int] = []
        end = 0
        while end < identity[0]:
            place, proof = self._chosen[identity, column, len(places), end]
            places.append(place)
            end = proof.segment.stop
        return places
