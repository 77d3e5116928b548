"""Objects behind an HTTP server. Its pages of links are the listings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from hsx_dist.config.redaction import redact_text
from hsx_dist.config.urls import public_url
from hsx_dist.errors import NotFound, StoreError
from hsx_dist.store.base import ObjectInfo, check_name
from hsx_dist.store.fsspec import FsspecStore

T = TypeVar("T")

#: A folder with links to itself has folders without end. A run has five levels, and a server's paths at most nine.
_DEEPEST = 12
#: Limit in bytes of a folder's page. The page of 100,000 objects has about 20 MiB.
_LARGEST_PAGE = 64 << 20
#: Servers write a folder's path at the end of its page's title.
_TITLE = re.compile(r"<title>([^<]{0,10000})", re.IGNORECASE)
_LINK = re.compile(r"<(a|link)\s([^<>]*)", re.IGNORECASE)
_VALUE = r"\s*+=\s*+(?:\"([^\"]*)\"|'([^']*)'|([^\s'\">]+))"
_HREF = re.compile(rf"(?<![\w-])href{_VALUE}", re.IGNORECASE)
_REL = re.compile(rf"(?<![\w-])rel{_VALUE}", re.IGNORECASE)
#: Parameters of a link to another part of the same folder.
_PART = frozenset(("after", "continuation-token", "cursor", "marker", "offset", "p", "page", "skip", "start"))


class HttpStore(FsspecStore):
    """A ``Store`` over an HTTP server that lists folders, as Python's ``http.server`` and nginx's ``autoindex`` do.

    Many servers list no folders: they answer 404, or a page without the links. So the first listing looks for an
    object that was read before in the page of the root. Without that proof an empty listing could hide objects.
    """

    #: The first object that was read: an object that a listing must name.
    _known: str | None = None
    _lists_folders = False

    def _path(self, name: str) -> str:
        return f"{self._root}/{_quoted(check_name(name))}"

    def _call(self, verb: str, name: str, call: Callable[[], T], past_end: T | None = None) -> T:
        answer = super()._call(verb, name, call, past_end)
        # A list is the answers to several ranges, which may be errors.
        if verb in ("get", "head") and self._known is None and not isinstance(answer, list):
            self._known = name
        return answer

    def _list_any(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        if not self._lists_folders:
            self._require_listings(prefix)
        yield from super()._list_any(prefix, after)

    def _require_listings(self, prefix: str) -> None:
        """Raise ``StoreError`` unless the root's page names the known object, or anything if none is known.

        Some servers link to files plainly, and to folders by a query or without a slash at the end. Then folders are
        missing, or look like objects. So before a folder is listed, the root's page must link to some folder.
        """
        known = self._known
        needed = "".join(known.partition("/")[:2]) if known else None
        folder, slash, _ = prefix.partition("/")
        try:
            found = {str(info["name"])[len(self._root) + 1 :] for info in self._listed(prefix, self._root)}
        except NotFound:
            raise self._lists_nothing(prefix, "404", self.url) from None
        if slash and folder in found:
            raise self._lists_nothing(prefix, f"a link to {folder} without a slash at its end", self.url)
        if needed and needed not in found:
            raise self._lists_nothing(prefix, f"a page without a link to {needed}", self.url)
        if slash and not any(name.endswith("/") for name in found):
            raise self._lists_nothing(prefix, "a page without links to folders", self.url)
        self._lists_folders = known is not None

    def _lists_nothing(self, prefix: str, got: str, url: str) -> StoreError:
        return StoreError(
            f"list {self.url}/{prefix}: expected a server that lists folders, got {got} at {public_url(url)}. Use a "
            "server that lists them, or copy the run to a folder"
        )

    def _listed(self, prefix: str, folder: str) -> Sequence[Mapping[str, Any]]:
        """List ``folder`` with the names that were written. A page has them percent-encoded, and HTML-escaped."""
        below = folder.removeprefix(self._root)
        if below.count("/") > _DEEPEST:
            raise StoreError(
                f"list {self.url}/{prefix}: expected at most {_DEEPEST} folders in one another, got more. Remove links "
                "to folders above, or copy the run to a folder"
            )
        url = f"{self._root}{_quoted(below)}" if below != folder else folder
        longest = self._limit(patience=10 * self._patience)
        page: bytes = self._call("list", prefix, lambda: self._page(url, longest))
        try:
            names = dict.fromkeys(_names_in(page, url))
            further = _further_page(page, url)
            found = _TITLE.search(page.decode(errors="replace"))
            title = unescape(found[1]).strip().rstrip("/") if found else ""
        except ValueError as e:
            raise self._lists_nothing(
                prefix, f"a link or title that cannot be read ({redact_text(str(e))[:100]})", url
            ) from e
        if further is not None:
            raise StoreError(
                f"list {self.url}/{prefix}: expected one page with every name, got a link to a further page "
                f"({redact_text(further)[:100]!r}) at {public_url(url)}. Let the server list "
                "whole folders, or copy the run to a folder"
            )
        if not names and not (below and title.endswith(below)):
            # Not the page of an empty folder: it may be a log-in page, or ask to wait.
            raise self._lists_nothing(prefix, "a page without links, and without the folder's name as its title", url)
        return [
            {"name": f"{folder}/{name}", "size": None, "type": "directory" if name.endswith("/") else "file"}
            for name in names
        ]

    def _page(self, url: str, limit: Mapping[str, float]) -> bytes:
        from hsx_dist.store.bounded_response import WITHOUT_RANGE  # needs a package of an extra

        before = WITHOUT_RANGE.set(_LARGEST_PAGE)
        try:
            return bytes(self._fs.cat_file(url, **limit))
        finally:
            WITHOUT_RANGE.reset(before)


def _quoted(name: str) -> str:
    """Percent-encode a name. Bytes that are not UTF-8 are half surrogate pairs, as in names of files."""
    return quote(name, errors="surrogateescape")


def _links(page: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield of each link of a page: its tag, the kind of its target (``rel``), and the target."""
    for tag in _LINK.finditer(page.decode(errors="replace")):
        rel, href = _REL.search(tag[2]), _HREF.search(tag[2])
        yield (
            tag[1].lower(),
            rel[rel.lastindex or 0].lower() if rel else "",
            unescape(href[href.lastindex or 0]) if href else "",
        )


def _further_page(page: bytes, url: str) -> str | None:
    """Return a link to another page of the same folder, or None. The files that it names would be missing."""
    place = unquote(url.partition("://")[2]).rstrip("/")
    for _, rel, link in _links(page):
        path, _, query = link.partition("#")[0].partition("?")
        if path.startswith("/") and not path.startswith("//"):
            path = f"//{place.partition('/')[0]}{path}"
        itself = path in ("", ".", "./") or unquote(path.partition("//")[2]).rstrip("/") == place
        names = {part.partition("=")[0].lower() for part in re.split("[&;]", query)}
        if "next" in rel.split() or (itself and names & _PART):
            return link
    return None


def _names_in(page: bytes, url: str) -> Iterator[str]:
    """Yield the names that a folder's page links to. Takes time linear in the page, unlike fsspec's expression."""
    place = url.partition("://")[2]  # behind a proxy, an absolute link may have the other scheme
    for tag, _, link in _links(page):
        if tag != "a":
            continue
        if {"?", "#"}.intersection(link):  # Apache links "?C=N" to sort its page
            continue
        if link.startswith("/"):
            link = f"//{place.partition('/')[0]}{link}"
        if link.startswith(("//", "http://", "https://")):
            to = link.partition("//")[2]
            if not to.startswith(f"{place}/"):
                continue
            link = to.removeprefix(f"{place}/")
        name = unquote(link.removeprefix("./"), errors="surrogateescape")  # as ``_quoted``
        # A link may lead out of the folder.
        if not {"", ".", ".."}.intersection(name.removesuffix("/").split("/")) and "\0" not in name:
            yield name
