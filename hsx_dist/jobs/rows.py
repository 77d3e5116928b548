"""Input rows: streamed from JSONL and checked; a bad one becomes a refusal with its reason, and the rest goes on."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import fsspec
import zstandard
from fsspec.implementations.local import LocalFileSystem

from hsx_dist.config import InputConfig, is_local, public_url
from hsx_dist.errors import ConfigError, FormatError, InputError, Unavailable
from hsx_dist.format.manifest import RowFate
from hsx_dist.jobs.zstd_lines import ZstdFile

#: A longer line is refused without being held in memory.
MAX_LINE_BYTES = 64 << 20
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)
_MAX_KEY = 1024
_MAX_TOKEN_ID = (1 << 31) - 1
_SUFFIXES = re.compile(r"(\.(jsonl|json|ndjson))?(\.(gz|zst|zstd|bz2|xz))?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One usable input row: its key, its number in the input (from 0), and exactly one of text, messages, token_ids."""

    key: str
    row: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    #: Under which key this row would have been refused, had its own not been usable.
    number_key: str = field(default="", compare=False)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """Hash of what is tokenised: 16 hex digits."""
        body = json.dumps([self.text, self.messages, self.token_ids], sort_keys=True, default=str)
        return hashlib.blake2b(body.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def read_rows(config: InputConfig) -> Iterator[Row | RowFate]:
    """The rows of ``config.path`` in their order; the file is opened before this returns.

    Raises ConfigError when there is no such file or bucket, or no access to it; while iterating, Unavailable when the
    store fails and FormatError when compressed data is broken, each with the number of the row that was not reached.
    """
    if not config.path:
        raise ConfigError("input.path: expected a JSONL file, a local path or URL, came nothing; set it")
    return _rows(_open(config), config, public_url(config.path))


def rows_from(prompts: Iterable[Any], config: InputConfig) -> Iterator[Row | RowFate]:
    """Rows handed over in Python: each a text, token ids, chat messages, or a mapping like a JSONL row.

    One without an id has its number as its key: ``"0"``, ``"1"``, …
    """
    check = _RowCheck(config, "")
    for number, prompt in enumerate(prompts):
        if config.limit is not None and number >= config.limit:
            return
        yield check.judge(number, _as_record(prompt, config))


def _as_record(prompt: Any, config: InputConfig) -> Any:
    if isinstance(prompt, str):
        return {config.text: prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if hasattr(prompt, "tolist"):  # numpy or torch
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence):
        return {config.messages if prompt and isinstance(prompt[0], Mapping) else config.token_ids: list(prompt)}
    return prompt


def _rows(file: IO[bytes], config: InputConfig, shown: str) -> Iterator[Row | RowFate]:
    check = _RowCheck(config, _stem(config.path))
    number = -1
    try:
        with file:
            for number, line in _lines(file):
                if config.limit is not None and number >= config.limit:
                    return
                yield check.judge_line(number, line)
    except _BROKEN as e:
        raise FormatError(
            f"expected {shown} to be whole, came broken compressed data after row {number} ({type(e).__name__}); "
            "write or copy the file again"
        ) from e
    except OSError as e:
        raise Unavailable(
            f"expected to read {shown} to its end, came {type(e).__name__} after row {number}; try again when the "
            "store answers (rows already stored are skipped)"
        ) from e


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; ``None`` for one that is too long. Empty lines at the end of the file are no rows."""
    number, empty = -1, 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.strip() and len(line) <= MAX_LINE_BYTES:
            empty += 1
            continue
        for i in range(empty):
            yield number - empty + i, b""
        empty = 0
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, None
        else:
            yield number, line


class _RowCheck:
    """Judges rows one after another; remembers 16 bytes a key to find those that come twice."""

    def __init__(self, config: InputConfig, stem: str) -> None:
        self.config = config
        self.stem = stem
        self._seen: set[bytes] = set()

    def judge_line(self, number: int, line: bytes | None) -> Row | RowFate:
        if line is None:
            return self._refused(number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; split it")
        if not line.strip():
            return self._refused(number, "the line is empty; expected a JSON object")
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        except UnicodeDecodeError:
            return self._refused(number, "the line is not UTF-8; write it as UTF-8")
        except (ValueError, RecursionError) as e:
            what = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else type(e).__name__
            return self._refused(number, f"the line is not JSON ({what}); expected one JSON object")
        return self.judge(number, record)

    def judge(self, number: int, record: Any) -> Row | RowFate:
        if not isinstance(record, dict):
            return self._refused(number, f"expected a JSON object, came {_kind(record)}")
        key = None
        try:
            key = self._key(number, record)
            if not self._first(key):
                # Under its own number: the key belongs to the row that came first, even to a refused one.
                reason = f"duplicate id {key[:80]!r}: an earlier row has it; give each row its own"
                return self._refused(number, reason)
            kind, content = self._content(record)
        except InputError as e:
            return self._refused(number, str(e), key)
        own = {self.config.id, self.config.text, self.config.messages, self.config.token_ids}
        metadata = {k: v for k, v in record.items() if k not in own}
        return Row(key, number, number_key=self._number_key(number), metadata=metadata, **{kind: content})

    def _first(self, key: str) -> bool:
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        seen = digest in self._seen
        self._seen.add(digest)
        return not seen

    def _default_key(self, number: int) -> str:
        return f"{self.stem}:{number:08d}" if self.stem else str(number)

    def _number_key(self, number: int) -> str:
        # Not the default key: that one, or an id that looks like it, may belong to a row that is fine.
        return f"{self.stem}#{number:08d}"

    def _refused(self, number: int, reason: str, key: str | None = None) -> RowFate:
        return RowFate(key=key or self._number_key(number), row=number, fate="refused", reason=reason, tries=0)

    def _key(self, number: int, record: dict[str, Any]) -> str:
        name = self.config.id
        value = record.get(name) if name is not None else None
        if value is None:
            return self._default_key(number)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise InputError(f"{name}: expected a string or an integer, came {_kind(value)}")
        key = str(value)
        if not key or len(key) > _MAX_KEY:
            raise InputError(f"{name}: expected 1 to {_MAX_KEY} characters, came {len(key)}")
        if not _is_unicode(key):
            raise InputError(f"{name}: expected valid Unicode, came half of a surrogate pair")
        return key

    def _content(self, record: dict[str, Any]) -> tuple[str, Any]:
        names = {"text": self.config.text, "messages": self.config.messages, "token_ids": self.config.token_ids}
        given = {kind: name for kind, name in names.items() if record.get(name) is not None}
        if len(given) != 1:
            came = " and ".join(given.values()) if given else "none of them"
            raise InputError(f"expected exactly one of the fields {', '.join(names.values())}, came {came}")
        kind, name = next(iter(given.items()))
        value = record[name]
        problem = _CONTENT_CHECKS[kind](value)
        if problem:
            raise InputError(f"{name}: {problem}")
        return kind, value


def _text_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"expected a string, came {_kind(value)}"
    if not value.strip():
        return "expected text, came an empty string"
    return None if _is_unicode(value) else "expected valid Unicode, came half of a surrogate pair"


def _messages_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, came {_kind(value)}"
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"expected objects with a role, came {_kind(message)} without it as message {i}"
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            return f"expected the content of message {i} to be a string or a list, came {_kind(content)}"
        if isinstance(content, str) and not _is_unicode(content):
            return f"expected valid Unicode in message {i}, came half of a surrogate pair"
    return None


def _token_ids_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"expected a list of token ids, came {_kind(value)}"
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            return f"expected token ids (integers from 0), came {str(token)[:40]!r} at position {i}"
    return None


_CONTENT_CHECKS = {"text": _text_problem, "messages": _messages_problem, "token_ids": _token_ids_problem}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return names.get(type(value), type(value).__name__)


def _stem(path: str) -> str:
    name = public_url(path).rstrip("/").rpartition("/")[2]
    return _SUFFIXES.sub("", name) or name


def _open(config: InputConfig) -> IO[bytes]:
    shown = public_url(config.path)
    zstd = shown.lower().endswith((".zst", ".zstd"))
    compression = None if zstd else "infer"
    try:
        if is_local(config.path):
            # Not through fsspec.open, which would take * and [ of a local name for a pattern.
            local = str(Path(config.path).expanduser())
            file = LocalFileSystem().open(local, "rb", compression=compression)
        else:
            file = fsspec.open(config.path, "rb", compression=compression, **config.storage_options).open()
        return io.BufferedReader(ZstdFile(file), 1 << 18) if zstd else file
    except FileNotFoundError:
        came, todo = "no such file or bucket", "check the path"
    except PermissionError:
        came, todo = "a refusal", "check the credentials (environment, profile, or input.storage_options)"
    except IsADirectoryError:
        came, todo = "a folder", "name a file in it"
    except ImportError as e:
        came, todo = f"no support for its scheme ({e.name or 'a package'} is missing)", "install the extra s3 or gcs"
    except Exception as e:  # noqa: BLE001 (whatever a back end raises: it is told before anything starts, and without its text)
        known = isinstance(e, OSError) and e.strerror
        came, todo = (
            (str(known) if known else type(e).__name__),
            "check the URL, the endpoint and input.storage_options",
        )
    raise ConfigError(f"input.path: expected a readable JSONL file at {shown}, came {came}; {todo}")
