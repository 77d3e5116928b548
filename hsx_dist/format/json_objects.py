"""JSON objects in stores: limited in size, with checked types and errors that name the object."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any

from hsx_dist.errors import AlreadyExists, FormatError, IntegrityError, NotFound, Unavailable
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.store.base import Store
from hsx_dist.text import head

#: The largest JSON object that is read or written, except receipts. Parsed, JSON takes up to 25 times its size.
MAX_JSON_BYTES = 4 << 20
#: The most values in such an object, counted by their separators. A value takes far more memory than its text.
MAX_JSON_VALUES = 250_000
#: Larger numbers do not fit the int64 arrays and floats in which they are summed.
MAX_NUMBER = 2**62
#: Deeper JSON is refused: json and pickle recurse when they write it again, and fail.
MAX_DEPTH = 200
#: The member with the checksum of the others. Objects of earlier versions have none.
_CRC = "crc32c"

#: Writes the stored form of an object.
_STORED = json.JSONEncoder(indent=1, allow_nan=False)

#: Check of a member's value: returns a description of valid values if the value is invalid, else None.
MemberCheck = Callable[[Any], str | None]


def parse_json(text: str | bytes, *, floats: bool, constants: bool = False) -> Any:
    """Parse JSON without duplicate names or NaN, else raise ``FormatError``. ``floats=False`` also refuses fractions;
    ``constants=True`` accepts NaN and infinity."""
    with json_errors():
        return json_decoder(floats=floats, constants=constants).decode(text if isinstance(text, str) else text.decode())


@contextmanager
def json_errors() -> Iterator[None]:
    """Raise errors of a JSON decoder as ``FormatError``."""
    try:
        yield
    except FormatError:
        raise
    except (ValueError, RecursionError) as e:  # ValueError: also for a number of thousands of digits
        raise FormatError(f"expected JSON, got an error from the parser: {e}") from e


def json_decoder(*, floats: bool, constants: bool = False, objects: bool = True) -> json.JSONDecoder:
    """A decoder with the rules of ``parse_json``. Use it within ``json_errors``. ``objects=False`` refuses objects."""

    def refuse(token: str) -> Any:
        raise FormatError(f"expected JSON with whole numbers, got {token[:40]}")

    def finite(token: str) -> float:
        value = float(token)
        if not math.isfinite(value):
            raise FormatError(f"expected finite numbers, got {token[:40]}")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if not objects:
            raise FormatError("expected JSON without objects, got an object")
        d = dict(pairs)
        if len(d) != len(pairs):
            raise FormatError(f"expected JSON without duplicate names, got {len(d)} names for {len(pairs)} members")
        return d

    parse_float = finite if floats else refuse
    parse_constant = float if constants else refuse
    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=parse_constant, parse_float=parse_float)


#: A string of a JSON text.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
#: A string, which may lack its end, or a bracket. It matches at each quote: a search from each quote of a long string
#: without end would take quadratic time. Repetitions are possessive (``*+``): for others ``re`` keeps 110 bytes each.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
#: The same strings. The group has the colon behind a name.
_STRING_AND_COLON = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?[ \t\n\r]*+(:?)'


def too_many(what: str, most: int, items: str) -> FormatError:
    return FormatError(
        f"{what}: expected at most {most} {items}, got more. It was not written by hsx_dist, or is damaged"
    )


def count_members(
    text: str | bytes, most: int, begin: int = 0, end: int = MAX_NUMBER, *, besides: Sequence[str] = ()
) -> int:
    """The number of members of all objects in a JSON text, but not those with a name in ``besides``.

    The count is exact up to ``most``, and ends there.
    """
    skipped = f'"(?:{"|".join(besides)})"[ \\t\\n\\r]*+:|' if besides else ""
    pattern = skipped + _STRING_AND_COLON
    found: Iterator[re.Match[Any]]
    if isinstance(text, str):
        found = re.compile(pattern, re.DOTALL).finditer(text, begin, end)
    else:
        found = re.compile(pattern.encode(), re.DOTALL).finditer(text, begin, end)
    return sum(1 for _ in islice(filter(itemgetter(1), found), most))


def check_containers(data: bytes, most: int, what: str, *, besides: Sequence[str] = ()) -> None:
    """Raise ``FormatError`` if the JSON value that ``data`` begins with has more than ``most`` lists and objects, or
    ``data`` has more than ``most`` members.

    Parsed, these take the most memory: up to 28 times their text. ``besides``: as in ``count_members``.
    """
    if data.count(b"[") + data.count(b"{") > most:  # also in strings
        _check_brackets(data, most, what)
    if data.count(b":") > most and count_members(data, most + 1, besides=besides) > most:
        raise too_many(what, most, "members of objects")


def _check_brackets(data: bytes, most: int, what: str) -> None:
    found = depth = 0
    for token in _STRING_OR_BRACKET.finditer(data):
        bracket = token[0]
        if bracket in b"[{":
            found, depth = found + 1, depth + 1
            if found > most:
                raise too_many(what, most, "lists and objects")
        elif bracket in b"]}":
            depth -= 1
            if not depth:
                return


def check_depth(value: Any, what: str) -> None:
    """``FormatError`` when lists and objects are nested deeper than ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [v for x in level if isinstance(x, dict | list) for v in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise FormatError(f"{what}: expected lists and objects nested at most {MAX_DEPTH} deep, got deeper ones")


def shown(value: Any) -> str:
    """A JSON value for an error message, shortened to 80 characters."""
    if isinstance(value, dict | list | tuple):  # not printed: it may be large or deep
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(head(value, 80))[:80] if isinstance(value, str) else head(str(value), 80)


def get_small(store: Store, name: str, most: int, size: int | None = None) -> bytes:
    """Fetch the object ``name`` if it has at most ``most`` bytes. One request; fetches at most one byte more.

    ``size``: the object's size from a listing. If it exceeds ``most``, no request is made.

    Raises:
        NotFound: the object does not exist.
        FormatError: the object has more than ``most`` or ``size`` bytes.
    """
    limit = most if size is None else size
    if limit <= most:
        data = store.get(name, limit + 1)
        if len(data) <= limit:
            return data
    got = "more" if size is None else f"{size} or more"
    raise FormatError(
        f"{store.url}/{name}: expected at most {min(most, limit)} bytes, got {got}. It is damaged. Restore it"
    )


def read_json(store: Store, name: str) -> dict[str, Any]:
    """The JSON object stored under ``name``.

    Raises:
        NotFound: the object does not exist.
        FormatError: it is not a JSON object, has more than ``MAX_JSON_BYTES``, or more than ``MAX_JSON_VALUES`` values.
        IntegrityError: it has a checksum that does not match.
    """
    return checked_json(get_small(store, name, MAX_JSON_BYTES), f"{store.url}/{name}")


def get_json(store: Store, name: str, most: int = MAX_JSON_BYTES) -> bytes:
    """Fetch the JSON object ``name`` as ``get_small`` does. Only its first byte is checked: the page of a gateway is no
    JSON object.

    Raises:
        NotFound, FormatError: as ``get_small``.
        Unavailable: the answer does not begin like a JSON object.
    """
    found = get_small(store, name, most)
    if not found.startswith(b"{"):
        raise Unavailable(f"{store.url}/{name}: expected a JSON object, got other bytes. Check that the store answers")
    return found


def holds_json(store: Store, name: str) -> bool:
    """Whether the JSON object ``name`` exists. The page of a gateway answers a HEAD like any object, so this reads the
    object. Raises ``Unavailable`` as ``get_json``."""
    try:
        get_json(store, name)
    except NotFound:
        return False
    return True


def find_json(store: Store, name: str, checks: Mapping[str, MemberCheck]) -> dict[str, Any] | None:
    """The JSON object stored under ``name``, its members checked; ``None`` when it does not exist. Raises like
    ``read_json``, and ``FormatError`` when a member fails its check."""
    try:
        found = read_json(store, name)
    except NotFound:
        return None
    check_members(found, checks, f"{store.url}/{name}")
    return found


def dump_json(value: Mapping[str, Any]) -> bytes:
    """The stored form of the object, with its checksum. ``FormatError`` when ``read_json`` would refuse it."""
    try:
        body = _text_of({**value, _CRC: crc32c_hex(crc32c(_text_of(value)))})
    except FormatError:
        raise
    except (ValueError, TypeError, RecursionError) as e:
        raise FormatError(f"settings: expected values that JSON can hold, got others: {e}. Change them") from e
    checked_json(body, "settings")
    return body


def _text_of(value: Mapping[str, Any]) -> bytes:
    """The stored form of an object. ``FormatError``: it is larger than any stored object.

    Indented, nested JSON may have a hundred times its size.
    """
    pieces, size = list[str](), 1
    for piece in _STORED.iterencode(value):
        size += len(piece)
        if size > MAX_JSON_BYTES:
            raise FormatError(f"expected at most {MAX_JSON_BYTES} bytes of indented JSON, got more. Shorten it")
        pieces.append(piece)
    return "".join([*pieces, "\n"]).encode()


def checked_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in ``data`` without its checksum."""
    found = parse_object(data, where)
    expected = found.pop(_CRC, None)
    try:
        text = _text_of(found)  # also without a checksum: commands print the object with its indents
    except FormatError as e:
        raise FormatError(f"{where}: {e}") from e
    if expected is not None and expected != (crc := crc32c_hex(crc32c(text))):
        raise IntegrityError(
            f"{where}: expected crc32c {shown(expected)}, got {crc}: the object changed. Restore it, or write it again"
        )
    return found


def put_own(store: Store, name: str, body: bytes) -> bool:
    """Create a JSON object. Returns whether it has our content, also when the response to an earlier try was lost.

    Raises like ``get_json``.
    """
    try:
        store.put_if_absent(name, body)
    except AlreadyExists:
        return get_json(store, name) == body
    return True


def parse_object(data: bytes, where: str, *, values: int = MAX_JSON_VALUES, constants: bool = False) -> dict[str, Any]:
    """The JSON object in ``data``, with at most ``values`` values; ``constants``: as in ``parse_json``.

    Raises:
        FormatError: it is not a JSON object, or has more values or levels.
    """
    count = sum(map(data.count, (b",", b"[", b"{")))
    if count > values:
        raise FormatError(f"{where}: expected at most {values} JSON values, got about {count}. Shorten it")
    try:
        found = parse_json(data, floats=True, constants=constants)
    except FormatError as e:
        raise FormatError(f"{where}: {e}") from e
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected a JSON object, got a {type(found).__name__}")
    check_depth(found, where)
    return found


def check_members(found: Mapping[str, Any], checks: Mapping[str, MemberCheck], where: str) -> None:
    """Raise ``FormatError`` for a member of ``found`` that fails its check. Missing members are valid."""
    for name, check in checks.items():
        expected = check(found[name]) if name in found else None
        if expected is not None:
            raise FormatError(f"{where}: {name}: expected {expected}, got {shown(found[name])}. Restore the object")


# -- checks ----------------------------------------------------------------------------------------------------------


def text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def count(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value < MAX_NUMBER else f"a whole number from 0 to {MAX_NUMBER}"


def number(value: Any) -> str | None:
    fine = type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER  # false for NaN
    return None if fine else "a finite number"


def or_null(check: MemberCheck) -> MemberCheck:
    return lambda value: None if value is None else check(value)


def list_of(check: MemberCheck) -> MemberCheck:
    """A list whose values all pass ``check``."""

    def checked(value: Any) -> str | None:
        if isinstance(value, list | tuple):
            wrong = next((expected for v in value if (expected := check(v)) is not None), None)
            return None if wrong is None else f"a list in which each value is {wrong}"
        return "a list"

    return checked


def object_of(check: MemberCheck) -> MemberCheck:
    """A JSON object whose values all pass ``check``."""

    def checked(value: Any) -> str | None:
        if isinstance(value, dict):
            wrong = next((expected for v in value.values() if (expected := check(v)) is not None), None)
            return None if wrong is None else f"an object in which each value is {wrong}"
        return "an object"

    return checked


def members(checks: Mapping[str, MemberCheck]) -> MemberCheck:
    """A JSON object whose members pass ``checks``."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object"
        for name, check in checks.items():
            expected = check(value[name]) if name in value else None
            if expected is not None:
                return f"an object whose {name} is {expected}"
        return None

    return checked


def anything(value: Any) -> str | None:  # noqa: ARG001
    return None
