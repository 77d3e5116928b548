"""Checks of a listing's pages: a store must say how each page continues, and must name each object once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store.base import ObjectInfo, stated_size


def sorts_by_name(endpoint: str) -> bool:
    """Whether a service lists names in order. AWS and Google document it. SeaweedFS lists "a/b" before "a-b"."""
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".googleapis.com"))


def in_order(found: Iterable[ObjectInfo], where: str) -> Iterator[ObjectInfo]:
    """Yield the objects of a store that lists them by name.

    Raises:
        StoreError: a name is not after the one before it. The store repeated a page, perhaps in place of another.
    """
    last = None
    for info in found:
        if last is not None and info.name <= last:
            raise _repeated(info, where)
        last = info.name
        yield info


def put_in_order(found: Iterable[ObjectInfo], where: str) -> list[ObjectInfo]:
    """Return the objects of a store that lists them in any order, by name.

    Raises:
        StoreError: as ``in_order``, at the first name that comes again: the listing might not end.
    """
    by_name: dict[str, ObjectInfo] = {}
    for info in found:
        if by_name.setdefault(info.name, info) is not info:
            raise _repeated(info, where)
    return [by_name[name] for name in sorted(by_name)]


def without_markers(found: Iterable[ObjectInfo], is_marker: Callable[[str], bool]) -> Iterator[ObjectInfo]:
    """Yield the objects without a console's folder markers. A marker ``k/`` is listed as an empty ``k``, by obstore.

    An object ``k`` may exist too. ``is_marker(name)``: whether there is no such object. Each name is left out once, so
    that a repeated page is seen.
    """
    left_out, names = set[str](), set[str]()
    aside: dict[str, ObjectInfo] = {}
    for info in found:
        if info.size or info.name in left_out:
            names.add(info.name)
            yield info
        elif info.name in aside:
            left_out.add(info.name)
        else:
            aside[info.name] = info
    yield from (info for name, info in aside.items() if name not in names and not is_marker(name))


def _repeated(info: ObjectInfo, where: str) -> StoreError:
    return StoreError(
        f"{where}: expected each name once, got {info.name} again or late: the store repeats a page, and objects may "
        "be missing. Use another store"
    )


def name_below(root: str, path: str, where: str) -> str:
    """Return the name of a listed object. ``root``: the store's folder, with a slash at its end.

    Raises:
        StoreError: ``path`` is not below the folder. The store lists other names than it was asked for.
    """
    if not path.startswith(root):
        raise StoreError(
            f"{where}: expected names that begin with {root!r}, got {path!r}: objects may be missing. Use another store"
        )
    return path[len(root) :]


def listed(entry: Mapping[str, Any], where: str) -> ObjectInfo:
    """Return the object of an entry of S3's ``list_objects_v2``, under its whole key.

    Raises:
        StoreError: the entry lacks the key or the size.
    """
    return ObjectInfo(named(entry.get("Key"), where), stated_size(entry.get("Size"), where))


_NEXT_OF_S3 = "NextContinuationToken (ListObjectsV2)"
#: Members of S3's answers to a listing. Services omit some of them.
_LISTING = frozenset(("Name", "KeyCount", "Prefix", "MaxKeys", "IsTruncated"))


def require_listing(answer: Mapping[str, Any], where: str) -> None:
    """Check that S3's answer is a listing. botocore makes an empty one of the page of a gateway, and of other XML.

    Raises:
        Unavailable: the answer has no member that a listing has.
    """
    if _LISTING.isdisjoint(answer):
        raise Unavailable(f"{where}: expected a listing (ListBucketResult), got another answer. Check the service")


def continues(
    first_page: Callable[[str], Mapping[str, Any]], prefix: str, listed_before: Sequence[str], where: str
) -> bool:
    """List one name, and return whether the store says how the listing continues.

    ``first_page(prefix)``: the answer to a listing of one name. ``listed_before``: keys that the store listed before.
    The answer shows nothing if it has several names, or if the others were deleted since.

    Raises:
        StoreError: the answer lacks an object, and has no token. Longer listings would lack objects too.
    """
    answer = first_page(prefix)
    require_listing(answer, where)
    if next_page(answer, where) is not None:
        return True
    named = _names(answer)
    if len(named) <= 1 and any(_names(first_page(name)) - named for name in listed_before if name not in named):
        raise StoreError(
            f"{where}: expected a NextContinuationToken in an answer without all names (ListObjectsV2), got none: the "
            "store cuts its listings, and objects may be missing. Use another store"
        )
    return False


def _names(answer: Mapping[str, Any]) -> Set[str]:
    """Return the keys of an answer, and the folders, which only a listing of one folder has."""
    keys = (str(entry.get("Key")) for entry in answer.get("Contents", ()))
    folders = (str(entry.get("Prefix")) for entry in answer.get("CommonPrefixes", ()))
    return dict.fromkeys((*keys, *folders)).keys()  # keeps the answer's order: ``Pages`` checks the first names


class _Tokens:
    """The tokens of a listing's pages. Finds every listing that comes back to an earlier page, and so never ends.

    Keeps one token: the last one at a count that is a power of two (Brent's algorithm). A listing may have a million.
    """

    def __init__(self, what: str, where: str):
        self._what, self._where = what, where
        self._kept: str | None = None
        self._count = 0

    def following(self, token: str) -> str:
        """Return the next page's token. Raises ``StoreError`` if it is the kept one."""
        if token == self._kept:
            raise StoreError(
                f"{self._where}: expected a page that is not the last one to have a new {self._what}, got the token of "
                "an earlier page: objects would be missing. Use another store"
            )
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._kept = token
        return token


class Pages:
    """The pages of a store's listings by S3's ``list_objects_v2``. Checks the store until it has continued a page."""

    _continues = False

    def answers(self, ask: Callable[..., Mapping[str, Any]], prefix: str, where: str) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing. ``ask(**arguments)``: the store's answer to one call.

        Raises ``StoreError`` like ``require_listing``, ``next_page`` and ``continues``.
        """
        token, tokens = None, _Tokens(_NEXT_OF_S3, where)
        while True:
            answer = ask(Prefix=prefix, **({"ContinuationToken": token} if token else {}))
            require_listing(answer, where)
            yield answer
            following = next_page(answer, where)
            if following is None:
                break
            token = tokens.following(following)
            self._continues = True
        names = _names(answer)
        if len(names) > 1 and not self._continues:
            some = list(names)[:4]
            self._continues = continues(lambda prefix: ask(Prefix=prefix, MaxKeys=1), prefix, some, where)

    def objects(self, ask: Callable[..., Mapping[str, Any]], prefix: str, where: str) -> Iterator[ObjectInfo]:
        """Yield all objects under their whole keys, without a console's folder markers. See ``answers``."""
        for answer in self.answers(ask, prefix, where):
            found = [listed(entry, where) for entry in answer.get("Contents", ())]
            yield from (info for info in found if not info.name.endswith("/"))


def pages_of_gcs(ask: Callable[..., Any], prefix: str, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of a listing by GCS's ``objects.list``. ``ask(**arguments)``: one call's answer.

    Raises:
        Unavailable: an answer is no listing, such as the page of a gateway.
        StoreError: a page names the token of an earlier page. The listing would not end.
    """
    token, tokens = None, _Tokens("nextPageToken (objects.list)", where)
    while True:
        page = ask(prefix=prefix, **({"pageToken": token} if token else {}))
        if not isinstance(page, Mapping) or page.get("kind") != "storage#objects":
            raise Unavailable(f"{where}: expected a listing (storage#objects), got another answer. Check the service")
        yield page
        following = page.get("nextPageToken")
        if not following:
            return
        token = tokens.following(str(following))


def objects_of_gcs(ask: Callable[..., Any], prefix: str, where: str) -> Iterator[ObjectInfo]:
    """Yield all objects of a listing by GCS under their whole names, without a console's folder markers.

    Raises:
        Unavailable: as ``pages_of_gcs``.
        StoreError: as ``pages_of_gcs`` and ``listed_by_gcs``.
    """
    for page in pages_of_gcs(ask, prefix, where):
        for item in items_of_gcs(page, "items", where):
            info = listed_by_gcs(item, where)
            if not info.name.endswith("/"):
                yield info


def items_of_gcs(page: Mapping[str, Any], member: str, where: str) -> Sequence[Any]:
    """Return a list that a page of GCS's listing may have. Raises ``StoreError`` if the member is no list."""
    found = page.get(member, [])
    if not isinstance(found, list):
        raise StoreError(
            f"{where}: expected a list as {member} (objects.list), got {type(found).__name__}. Use another store"
        )
    return found


def listed_by_gcs(item: Any, where: str) -> ObjectInfo:
    """Return the object of an entry of GCS's ``objects.list``, under its whole name.

    Raises:
        StoreError: the entry lacks the name or the size.
    """
    if not isinstance(item, Mapping):
        item = {}
    return ObjectInfo(named(item.get("name"), where), stated_size(item.get("size"), where))


def named(value: object, where: str) -> str:
    """Return the name of an object or a folder in a listing. Raises ``StoreError`` if it is no text, or empty."""
    if not isinstance(value, str) or not value:
        raise StoreError(f"{where}: expected the name of each object, got an entry without. Use another store")
    return value


def next_page(answer: Mapping[str, Any], where: str) -> str | None:
    """Return the continuation token of the next page of S3's ``list_objects_v2``, or None after the last page.

    A store that knows only version 1 of the call gives no token.

    Raises:
        StoreError: the page is not the last one, and has no token. The names after it would be missing.
    """
    # Some stores omit IsTruncated, or write it so that botocore reads false. A token says that there are more names.
    following = answer.get("NextContinuationToken")
    if not following and not answer.get("IsTruncated"):
        return None
    if not following:
        raise StoreError(
            f"{where}: expected a page that is not the last one to have a new {_NEXT_OF_S3}, got none: objects would "
            "be missing. Use another store"
        )
    return str(following)
