"""Files of web servers. Refuses what a server sends in place of a file of rows, or of the asked bytes of one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fsspec.asyn import sync

from hsx_dist.errors import ConfigError, Unavailable
from hsx_dist.store.partial_answers import PAGES, part_of
from hsx_dist.text import head

#: A file of at most so many bytes is fetched whole from a server that answers no ranges, such as Python's.
MOST_WHOLE = 5 << 20


class WebRanges:
    """Fetches ranges of fsspec's ``file`` of known size. fsspec itself takes most answers for the asked bytes.

    A server may send fewer bytes for a range, which it names. The rest is asked for again.
    """

    def __init__(self, file: Any, shown: str) -> None:
        self._file, self._shown = file, shown
        self._whole: bytes | None = None  # the file, if the server sent it for a range
        self._has_ranges = False

    def __call__(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``.

        Raises:
            Unavailable: the answer has other bytes.
            ConfigError: the server answers no ranges, and the file is large.
        """
        found = bytearray()
        while self._whole is None and start + len(found) < end:
            found += sync(self._file.loop, self._fetch, start + len(found), end)
        return bytes(found) if self._whole is None else self._whole[start:end]

    async def _fetch(self, start: int, end: int) -> bytes:
        """Return at least the first byte. If the answer is the whole file, keep it if it is small."""
        file, size = self._file, self._file.size
        headers = {**file.kwargs.get("headers", {}), "Range": f"bytes={start}-{end - 1}"}
        url, options = file.fs.encode_url(file.url), {**file.kwargs, "headers": headers}
        async with file.session.get(url, **options) as answer:
            answer.raise_for_status()
            # A part without a Content-Range is the asked one if it has as many bytes.
            named = answer.headers.get("Content-Range", f"bytes {start}-{end - 1}/*")
            asked = part_of(answer.status, named, start, end)
            if asked is not None and asked.size in (None, size):
                self._has_ranges = True
                body = await _at_most(answer, asked.nbytes + 1)  # ``read`` refuses a part of the range
                if len(body) == asked.nbytes:
                    return body
            elif answer.status == 200 and answer.content_length in (None, size):
                if size > MOST_WHOLE and start == 0 and answer.content_length == size and not self._has_ranges:
                    part = await _at_most(answer, end)
                    if len(part) == end:
                        return part
                else:
                    whole = await _at_most(answer, min(size, MOST_WHOLE) + 1)
                    if len(whole) == size:
                        self._whole = whole
                        return whole[start:end]
                    if len(whole) > MOST_WHOLE < size and not self._has_ranges:  # no page is so large
                        raise no_ranges(self._shown)
        raise Unavailable(
            f"expected the bytes from {start} to {end} of {self._shown}, which has {size} bytes, got another answer of "
            f"its server (status {answer.status}). Try again: stored rows are skipped"
        )


async def _at_most(answer: Any, size: int) -> bytes:
    """Return the first ``size`` bytes of an answer, or all of its bytes if it has fewer."""
    found = bytearray()
    while len(found) < size and (piece := await answer.content.read(size - len(found))):
        found += piece
    return bytes(found)


def check_stream(file: Any, shown: str, size: int | None) -> None:
    """Check the answer that fsspec's ``file`` of a web server reads.

    Raises:
        Unavailable: it is not the file.
        ConfigError: nothing states where it ends, so a lost connection looks like the file's end. A compressed file
            does not state it either: it may have several members or frames.
    """
    answer = file.r
    right_size = size is None or answer.content_length in (None, size)
    if answer.status != 200 or answer.content_type in PAGES or not right_size:
        raise Unavailable(
            f"expected {shown}, got another answer of its server (status {answer.status}, type "
            f"{head(str(answer.content_type), 50)}). Try again: stored rows are skipped"
        )
    codings = answer.headers.getall("Transfer-Encoding", [])
    is_chunked = [coding.strip(" \t").lower() for coding in codings] == ["chunked"]  # else aiohttp may decode no chunks
    if size is None and answer.content_length is None and not is_chunked:
        raise ConfigError(
            f"input.path: expected an answer with Content-Length or in chunks, got one whose end is not stated at "
            f"{shown}: rows may be missing. Use a server that sends Content-Length, or copy the file to a folder"
        )


def no_ranges(shown: str) -> ConfigError:
    """Return the error for a file of which a reader needs parts, on a server that sends only a stream."""
    return ConfigError(
        f"input.path: expected the parts of {shown} that are asked for, got a stream of its server. Use a server that "
        "sends Content-Length and answers ranges, or copy the file to a folder"
    )


def check_web_file(info: dict[str, Any], shown: str) -> None:
    """Raise ConfigError for a folder or a page: its lines would become rows, in place of the rows of its files.

    fsspec calls everything on a web server a file. ``info``: of the last answer, after redirects.
    """
    kind, url = str(info.get("mimetype")).strip().lower(), urlsplit(str(info.get("url") or info["name"]))
    if kind in PAGES:
        raise no_web_file(shown, f"a page of type {kind}")
    if not url.query and (not url.path or url.path.endswith("/")):
        raise no_web_file(shown, "a folder")


def no_web_file(shown: str, got: str) -> ConfigError:
    """Return the error for ``shown``, which is ``got`` instead of a file."""
    return ConfigError(
        f"input.path: expected the URL of a file on a web server, got {got} at {shown}. Name one file, or copy the "
        "files to a folder"
    )
