"""Which of a key's segments form its sample. Adding a segment takes constant time, however many were added before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

#: Shared by all segments of a sample, as ``identity_of`` returns it.
Identity = bytes
#: An identity and a column's number, as ``_pair`` returns it.
Pair = bytes
#: The part and slot of a place.
PlaceOf = Callable[[int], tuple[str, int]]
#: The last token and the token hash of the segment at a place.
EndOf = Callable[[int], tuple[int, bytes]]
#: Bits of a segment's first token in a state of ``_Attempt``: it is at most ``MAX_TOKENS``.
_START_BITS = 41
#: Bytes of a number of tokens, and of a column's number or a number of columns, in an identity.
_TOTAL, _COLUMN = 8, 4


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
        """The attempts that contradict themselves, except those older than the attempt of ``sample``.

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
        self._chosen: dict[Pair, dict[bytes, int]] = {}
        #: The same for states whose segments have different ends: all places, by end.
        self._cuts: dict[Pair, dict[bytes, dict[bytes, int]]] = {}
        #: By identity and column: the number of consecutive segments from the first token on, and their end.
        self._ends: dict[Pair, tuple[int, int]] = {}
        #: By identity and column with different cuts: all states to which segments lead from the first token.
        self._reached: dict[Pair, set[bytes]] = {}
        #: By identity: the pairs of the columns whose segments cover all tokens.
        self._covered: dict[Identity, Set[Pair]] = {}
        #: The hashes of all ids in the identities.
        self._hashes: set[bytes] = set()
        #: Whether two segments of the same place differ in their tokens.
        self._mixed = False
        self.whole: set[Identity] = set()

    @property
    def disputed(self) -> bool:
        """Whether segments contradict each other.

        Several known hashes do not: the row was computed again, and got other generated tokens. Each computation has
        an identity. Identities of one hash, or of an unknown hash and another one, do.
        """
        several = len(self._covered) > 1
        return self._mixed or (several and (b"" in self._hashes or len(self._hashes) < len(self._covered)))

    def add(self, place: int, identity: Identity, column: int, index: int, start: int) -> None:
        pair = _pair(identity, column)
        chosen = self._chosen.setdefault(pair, {})
        state = _state(index, start)
        first = chosen.setdefault(state, place)
        if first != place:
            self._add_another(place, pair, state)
        if pair in self._reached:
            self._follow(pair, state, place)
        else:
            count, end = self._ends.get(pair, (0, 0))
            while (following := chosen.get(_state(count, end))) is not None:
                count, end = count + 1, self._end_of(following)[0]
            self._ends[pair] = count, end
        self._cover(pair)

    def _add_another(self, place: int, pair: Pair, state: bytes) -> None:
        """Add a segment whose state another segment has."""
        chosen = self._chosen[pair]
        first, (end, tokens) = chosen[state], self._end_of(place)
        cuts = self._cuts.get(pair, {}).get(state) or {_cut(self._end_of(first)[0]): first}
        known = cuts.get(_cut(end))
        differ = self._end_of(known)[1] != tokens if known is not None else not _hash(_identity(pair))
        if differ and not self._mixed:
            self._mixed = True
            for other in self._ends:
                self._cover(other)
        if known is None or self._place_of(place) < self._place_of(known):
            cuts[_cut(end)] = place
        if self._place_of(place) < self._place_of(first):
            chosen[state] = place
        if len(cuts) > 1:
            self._cuts.setdefault(pair, {})[state] = cuts
            if pair not in self._reached:
                self._reached[pair] = set()
                self._reach(pair, _FIRST)

    def _follow(self, pair: Pair, state: bytes, place: int) -> None:
        if state in self._reached[pair]:
            self._reach(pair, _next(state, self._end_of(place)[0]))

    def _reach(self, pair: Pair, state: bytes) -> None:
        """Add a state to the reached ones, and all states to which segments lead from it. Each is visited once."""
        reached, todo = self._reached[pair], [state]
        while todo:
            state = todo.pop()
            if state not in reached:
                reached.add(state)
                index, start = _index_and_start(state)
                if start == _total(pair):
                    self._ends[pair] = index, start
                todo += [_next(state, _end(cut)) for cut in self._places(pair, state)]

    def _places(self, pair: Pair, state: bytes) -> Mapping[bytes, int]:
        """The segments of a state, by ``_cut``. Takes constant time: a state may have a million ends."""
        cuts = self._cuts.get(pair, {}).get(state)
        if cuts is not None:
            return cuts
        chosen = self._chosen[pair].get(state)
        return {} if chosen is None else {_cut(self._end_of(chosen)[0]): chosen}

    def _cover(self, pair: Pair) -> None:
        """Note whether a column covers all tokens, and with it whether the sample is whole."""
        identity = _identity(pair)
        known = self._covered.get(identity)
        if known is None:
            self._hashes.add(_hash(identity))
        covered = known if isinstance(known, set) else set()
        (covered.add if self._is_covered(pair) else covered.discard)(pair)
        self._covered[identity] = covered or _NONE
        (self.whole.add if len(covered) == _columns(identity) else self.whole.discard)(identity)

    def _is_covered(self, pair: Pair) -> bool:
        if not self._mixed:
            return self._ends[pair][1] == _total(pair)
        # The whole sample's hash may be unknown (empty), so segments with different tokens can have equal identities.
        # In a mixed attempt only a single segment that covers the column counts.
        return _cut(_total(pair)) in self._places(pair, _FIRST)

    def sample(self) -> list[int]:
        """The places of a whole sample's segments, column by column. Of several samples, the one with the lowest name
        of the first segment's part is chosen."""
        identity = min(sorted(self.whole), key=lambda known: self._place_of(self._chosen[_pair(known, 0)][_FIRST])[0])
        return [place for column in range(_columns(identity)) for place in self._chain(_pair(identity, column))]

    def _chain(self, pair: Pair) -> list[int]:
        """The chain of segments that leads to the last token. At each step the lowest part name is chosen."""

        def segments(state: bytes) -> Iterator[int]:
            places = self._places(pair, state)
            if self._mixed:
                places = {cut: place for cut, place in places.items() if cut == _cut(_total(pair))}
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
            if end == _total(pair):
                return [*chain, place]
            if (following := _next(state, end)) not in seen:
                seen.add(following)
                chain.append(place)
                todo.append((following, segments(following)))
        raise AssertionError("expected a chain of segments of a whole sample, got none")


# Keys of dictionaries are bytes. Python's hash of integers, and of tuples of them, has no seed. So a receipt could make
# all of them collide.


def identity_of(total: int, columns: int, sample_hash: bytes) -> Identity:
    """The identity of a sample with this number of tokens and of columns, and this hash of all ids."""
    return total.to_bytes(_TOTAL) + columns.to_bytes(_COLUMN) + sample_hash


def _total(known: Identity | Pair) -> int:
    """The number of tokens."""
    return int.from_bytes(known[:_TOTAL])


def _columns(identity: Identity) -> int:
    """The number of columns."""
    return int.from_bytes(identity[_TOTAL : _TOTAL + _COLUMN])


def _hash(identity: Identity) -> bytes:
    """The hash of all ids. Empty: unknown."""
    return identity[_TOTAL + _COLUMN :]


def _pair(identity: Identity, column: int) -> Pair:
    return identity + column.to_bytes(_COLUMN)


def _identity(pair: Pair) -> Identity:
    return pair[:-_COLUMN]


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
_NONE: Set[bytes] = frozenset()
