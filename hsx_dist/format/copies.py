"""Which of a key's segments form its sample. Adding a segment takes constant time, however many were added before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

#: Shared by all segments of a sample: its number of tokens, its number of columns, and the hash of the ids.
Identity = tuple[int, int, bytes]
#: The part and slot of a place.
PlaceOf = Callable[[int], tuple[str, int]]
#: The last token and the token hash of the segment at a place.
EndOf = Callable[[int], tuple[int, bytes]]
#: Bits of a segment's first token in a state of ``_Attempt``: it is at most ``MAX_TOKENS``.
_START_BITS = 41


class Copies:
    """The segments of one key. ``added``: for the caller's use, how many segments of its list were added.

    A segment takes about 150 bytes, and about 900 bytes if no other segment has its identity. A receipt of a few KiB,
    compressed, may have a million segments of one key and identity. Different hashes make it larger.
    """

    def __init__(self, place_of: PlaceOf, end_of: EndOf) -> None:
        self.added = 0
        self._of = place_of, end_of
        self._attempts: dict[bytes, _Attempt] = {}
        self._whole: set[bytes] = set()
        self._disputed: set[bytes] = set()

    def add(self, place: int, attempt: int, identity: Identity, column: int, index: int, start: int) -> None:
        """Add the segment that an attempt proves at ``place``."""
        name = attempt_name(attempt)
        found = self._attempts.get(name)
        if found is None:
            found = self._attempts[name] = _Attempt(*self._of)
        found.add(place, identity, column, index, start)
        (self._whole.add if found.whole else self._whole.discard)(name)
        if found.disputed:
            self._disputed.add(name)

    def sample(self) -> list[int]:
        """Where the newest attempt that proves the whole sample stored its segments. Empty if no attempt does."""
        return self._attempts[max(self._whole)].sample() if self._whole else []

    def disputed(self) -> set[bytes]:
        """The attempts that stored the key with different tokens, except those older than the attempt of ``sample``.

        Each as its ``attempt_name``."""
        if not self._whole:
            return self._disputed
        used = max(self._whole)
        return {attempt for attempt in self._disputed if attempt >= used}


class _Attempt:
    """The segments of one key that one attempt proves. Only segments with equal identity form a sample.

    A row may be stored twice, by engines that cut it at different tokens (their cache blocks have different sizes).
    Then segments of one index and start have different ends. They have the same tokens, as their hash says, so each
    chain of them that ends with the last token is the sample. A column with such cuts is a graph: a state is an index
    and a first token, and a segment leads from a state to the next one.
    """

    def __init__(self, place_of: PlaceOf, end_of: EndOf) -> None:
        self._place_of, self._end_of = place_of, end_of
        #: By identity and column; then by state: the place with the lowest part name.
        self._chosen: dict[tuple[Identity, int], dict[bytes, int]] = {}
        #: The same for states whose segments have different ends: all places, by end.
        self._cuts: dict[tuple[Identity, int], dict[bytes, dict[bytes, int]]] = {}
        #: By identity and column: the number of consecutive segments from the first token on, and their end.
        self._ends: dict[tuple[Identity, int], tuple[int, int]] = {}
        #: By identity and column with different cuts: all states to which segments lead from the first token.
        self._reached: dict[tuple[Identity, int], set[bytes]] = {}
        #: By identity: the columns whose segments cover all tokens.
        self._covered: dict[Identity, Set[int]] = {}
        #: Whether two segments of the same place differ in their tokens.
        self._mixed = False
        self.whole: set[Identity] = set()

    @property
    def disputed(self) -> bool:
        return self._mixed or len(self._covered) > 1

    def add(self, place: int, identity: Identity, column: int, index: int, start: int) -> None:
        chosen = self._chosen.setdefault((identity, column), {})
        state = _state(index, start)
        first = chosen.setdefault(state, place)
        if first != place:
            self._add_another(place, identity, column, state)
        if (identity, column) in self._reached:
            self._follow(identity, column, state, place)
        else:
            count, end = self._ends.get((identity, column), (0, 0))
            while (following := chosen.get(_state(count, end))) is not None:
                count, end = count + 1, self._end_of(following)[0]
            self._ends[identity, column] = count, end
        self._cover(identity, column)

    def _add_another(self, place: int, identity: Identity, column: int, state: bytes) -> None:
        """Add a segment whose state another segment has."""
        chosen = self._chosen[identity, column]
        first, (end, tokens) = chosen[state], self._end_of(place)
        cuts = self._cuts.get((identity, column), {}).get(state) or {_cut(self._end_of(first)[0]): first}
        known = cuts.get(_cut(end))
        differ = self._end_of(known)[1] != tokens if known is not None else not identity[2]
        if differ and not self._mixed:
            self._mixed = True
            for other, of in self._ends:
                self._cover(other, of)
        if known is None or self._place_of(place) < self._place_of(known):
            cuts[_cut(end)] = place
        if self._place_of(place) < self._place_of(first):
            chosen[state] = place
        if len(cuts) > 1:
            self._cuts.setdefault((identity, column), {})[state] = cuts
            if (identity, column) not in self._reached:
                self._reached[identity, column] = set()
                self._reach(identity, column, _FIRST)

    def _follow(self, identity: Identity, column: int, state: bytes, place: int) -> None:
        if state in self._reached[identity, column]:
            self._reach(identity, column, _next(state, self._end_of(place)[0]))

    def _reach(self, identity: Identity, column: int, state: bytes) -> None:
        """Add a state to the reached ones, and all states to which segments lead from it. Each is visited once."""
        reached, todo = self._reached[identity, column], [state]
        while todo:
            state = todo.pop()
            if state not in reached:
                reached.add(state)
                index, start = _index_and_start(state)
                if start == identity[0]:
                    self._ends[identity, column] = index, start
                todo += [_next(state, _end(cut)) for cut in self._places(identity, column, state)]

    def _places(self, identity: Identity, column: int, state: bytes) -> Mapping[bytes, int]:
        """The segments of a state, by ``_cut``. Takes constant time: a state may have a million ends."""
        cuts = self._cuts.get((identity, column), {}).get(state)
        if cuts is not None:
            return cuts
        chosen = self._chosen[identity, column].get(state)
        return {} if chosen is None else {_cut(self._end_of(chosen)[0]): chosen}

    def _cover(self, identity: Identity, column: int) -> None:
        """Note whether a column covers all tokens, and with it whether the sample is whole."""
        known = self._covered.get(identity)
        covered = known if isinstance(known, set) else set()
        (covered.add if self._is_covered(identity, column) else covered.discard)(column)
        self._covered[identity] = covered or _NONE
        (self.whole.add if len(covered) == identity[1] else self.whole.discard)(identity)

    def _is_covered(self, identity: Identity, column: int) -> bool:
        if not self._mixed:
            return self._ends[identity, column][1] == identity[0]
        # The whole sample's hash may be unknown (empty), so segments with different tokens can have equal identities.
        # In a mixed attempt only a single segment that covers the column counts.
        return _cut(identity[0]) in self._places(identity, column, _FIRST)

    def sample(self) -> list[int]:
        """The places of a whole sample's segments, column by column. Of several samples, the one with the lowest name
        of the first segment's part is chosen."""
        identity = min(sorted(self.whole), key=lambda known: self._place_of(self._chosen[known, 0][_FIRST])[0])
        return [place for column in range(identity[1]) for place in self._column(identity, column)]

    def _column(self, identity: Identity, column: int) -> list[int]:
        """The chain of segments that leads to the last token. At each step the lowest part name is chosen."""

        def segments(state: bytes) -> Iterator[int]:
            places = self._places(identity, column, state)
            if self._mixed:
                places = {cut: place for cut, place in places.items() if cut == _cut(identity[0])}
            return iter(sorted(places.values(), key=self._place_of))

        chain, todo, seen = list[int](), [(_FIRST, segments(_FIRST))], {_FIRST}
        while todo:
            state, left = todo[-1]
            place = next(left, None)
            if place is None:  # no segment leads from this state to the last token
                todo.pop()
                del chain[-1:]
                continue
            end = self._end_of(place)[0]
            if end == identity[0]:
                return [*chain, place]
            if (following := _next(state, end)) not in seen:
                seen.add(following)
                chain.append(place)
                todo.append((following, segments(following)))
        raise AssertionError("expected a chain of segments of a whole sample, got none")


# Keys of dictionaries are bytes: Python's hash of integers has no seed, so a receipt could make all of them collide.


def attempt_name(attempt: int) -> bytes:
    """The key of an attempt. Keys are ordered as the attempts are. ``int.from_bytes`` returns the attempt."""
    return attempt.to_bytes(8)


def _cut(end: int) -> bytes:
    """The key of a segment's last token."""
    return end.to_bytes(8)


def _end(cut: bytes) -> int:
    return int.from_bytes(cut)


def _state(index: int, start: int) -> bytes:
    """The state of a segment."""
    return (index << _START_BITS | start).to_bytes(11, "little")


def _index_and_start(state: bytes) -> tuple[int, int]:
    return divmod(int.from_bytes(state, "little"), 1 << _START_BITS)


def _next(state: bytes, end: int) -> bytes:
    """The state to which a segment with this end leads."""
    return _state(_index_and_start(state)[0] + 1, end)


_FIRST = _state(0, 0)
#: Shared, because a million identities may have no column that is covered, and an empty set takes 200 bytes.
_NONE: Set[int] = frozenset()
