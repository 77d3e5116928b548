"""Streams and checks input rows. A bad row becomes a refusal with its reason, and the other rows are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hsx_dist.config import InputConfig, public_url
from hsx_dist.errors import ConfigError, InputError
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.names import MAX_KEY
from hsx_dist.inputs.content import CONTENT_CHECKS, as_messages, as_tools, given_tools, json_metadata, mask_of
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.reader import read_in_child
from hsx_dist.inputs.records import RecordBatch, read_batches
from hsx_dist.inputs.refused import RefusedRows
from hsx_dist.inputs.row_cost import cost_of_json, memory_of, most_cost
from hsx_dist.inputs.row_values import is_unicode, kind_of, row_json, shown
from hsx_dist.inputs.tables import Unreadable
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Settings that name a field of a row, besides ``metadata``.
_FIELDS = ("text", "messages", "token_ids", "id", "tools", "loss_mask")
#: After this many rows a field that a setting names, and that no row has, is warned of.
_WITHOUT_FIELD = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One usable input row: its key, its number in the input (from 0), and exactly one of text, messages, token_ids.

    ``tools``: for the chat template. ``loss_mask``: 0 or 1 for each token. ``metadata``: the requested columns, as JSON
    values.
    """

    key: str
    row: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    #: Key of the refusal if this row's own key were not usable.
    number_key: str = field(default="", compare=False)
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    loss_mask: list[int] | None = None

    @property
    def content(self) -> str:
        """Hash of the fields that determine the sample: 16 hex digits."""
        return _hash(self.body)

    @property
    def body(self) -> bytes:
        """JSON of the fields that determine the sample, in order: a chat template may print members in order."""
        return _json([self.text, self.messages, self.token_ids, self.tools, self.loss_mask, self.metadata])

    @property
    def memory(self) -> int:
        """About how many bytes the row takes as Python objects."""
        numbers = 40 * len(self.token_ids or ()) + 8 * len(self.loss_mask or ())  # Python shares the objects 0 and 1
        return 500 + numbers + sum(map(memory_of, (self.key, self.text, self.messages, self.tools, self.metadata)))

    @property
    def old_content(self) -> str:
        """``content`` in the ``first_rows`` of earlier versions, without metadata and the order of members."""
        more = [] if self.tools is None and self.loss_mask is None else [self.tools, self.loss_mask]
        return _hash(_json([self.text, self.messages, self.token_ids, *more], sort_keys=True))


def _json(parts: list[Any], *, sort_keys: bool = False) -> bytes:
    return json.dumps(parts, sort_keys=sort_keys, default=str).encode("utf-8", "surrogatepass")


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def read_rows(config: InputConfig) -> Iterator[Row | RowFate]:
    """Return an iterator over the rows of ``config.path``, in order. Opens the first file before it returns.

    Raises ``ConfigError`` if there is no such file or bucket, or no access. While iterating, raises ``Unavailable`` if
    the store fails, and ``FormatError`` if a file is broken; both name the number of the first row that was not read.
    """
    needed = (config.text, config.messages, config.token_ids)
    own = (config.id, config.tools, config.loss_mask, *config.metadata)
    columns = [*needed, *(name for name in own if name is not None)]
    found = None if "::" in config.path else find_input(config)
    if found is not None and found.is_plain:
        batches = read_batches(found, columns, needed)
    else:
        batches = read_in_child(config, None if found is None else found.sources, columns, needed)
    for opened in batches:  # the first file is open
        return _rows(batches, config, opened)
    raise ConfigError(f"input.path: expected files of rows at {public_url(config.path)}, got none. Name them")


def rows_from(prompts: Iterable[Any], config: InputConfig) -> Iterator[Row | RowFate]:
    """Yield rows from Python values: each is a text, token ids, chat messages, or a mapping like a JSONL row.

    The key of a row without an id is its number: ``"0"``, ``"1"``, …
    """
    check = _RowCheck(config, [""])
    choice = _Choice(config)
    for number, prompt in enumerate(prompts):
        if choice.ended():
            break
        if choice.takes("", number):
            try:
                record = _as_record(prompt, config)
            except MemoryError:
                raise  # not the row's fault
            except Exception as e:  # noqa: BLE001 - the methods of a caller's type may raise any error
                record = Unreadable(
                    f"expected text, token ids or messages, got {type(prompt).__name__} that raises {type(e).__name__}"
                )
            yield check.judge(number, number, record)
    check.warn_of_missing()


def _as_record(prompt: Any, config: InputConfig) -> Any:
    if isinstance(prompt, str):
        return {config.text: prompt}
    if isinstance(prompt, Mapping):
        record = dict(prompt)
        for name in (config.messages, config.token_ids, config.tools, config.loss_mask):
            if name in record:
                record[name] = _as_list(record[name])
        return record
    prompt = _as_list(prompt)
    if isinstance(prompt, list):
        return {config.messages if prompt and isinstance(prompt[0], Mapping) else config.token_ids: prompt}
    return prompt


def _as_list(value: Any) -> Any:
    """Return a list for a sequence, or an array of numpy or torch. Other values stay."""
    value = value.tolist() if hasattr(value, "tolist") else value
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return list(value) if isinstance(value, Sequence) and not is_text else value


def _rows(batches: Iterator[RecordBatch], config: InputConfig, opened: RecordBatch) -> Iterator[Row | RowFate]:
    choice = _Choice(config)
    check = _RowCheck(config, list(opened.labels))
    row, refused, usable = -1, RefusedRows(), 0
    if choice.ended():
        return
    for source in batches:
        check.stem = source.label
        for number, item in source.records:
            row += 1
            if not choice.takes(source.label, number):
                continue
            if source.format == "text" and item is not None:
                judged = check.judge_text(row, number, item)
            elif source.format == "jsonl" or item is None:
                judged = check.judge_line(row, number, item)
            else:
                judged = check.judge(row, number, item)
            if isinstance(judged, Row):
                usable += 1
            else:
                refused.add(judged)
                where = f"up to row {number} of {source.label or 'the input'}"
                if (excess := refused.excess(usable, where)) is not None:
                    raise excess
            yield judged
            if choice.ended():
                check.warn_of_missing()
                return
    check.warn_of_missing()


class _Choice:
    """Selects rows: a share by a hash of their position, then a shard of these, then the first ``limit`` of these."""

    def __init__(self, config: InputConfig) -> None:
        self._config = config
        self._left = config.limit
        self._seen = -1

    def ended(self) -> bool:
        """Whether no further row is taken."""
        return self._left == 0

    def takes(self, label: str, number: int) -> bool:
        """Whether the next row, number ``number`` of the source ``label``, is taken."""
        c = self._config
        if c.sample is not None:
            place = f"{c.sample_seed}:{label}:{number}".encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(place, digest_size=8).digest()
            if int.from_bytes(digest) >= c.sample * 2**64:
                return False
        self._seen += 1
        if self._seen % c.num_shards != c.shard_index:
            return False
        if self._left is not None:
            self._left -= 1
        return True


class _RowCheck:
    """Checks rows one after another. Keeps a hash of each key to find duplicates: about 100 bytes per row. Keeps none
    if ``id`` is null, because the keys are then row numbers."""

    def __init__(self, config: InputConfig, stems: Sequence[str]) -> None:
        """``stems``: the labels of all sources of the input."""
        self.config = config
        self.stem = stems[0]
        self._places = {_place_stem(stem) for stem in stems}
        self._seen: set[bytes] = set()
        self._missing = _named_fields(config)
        self._judged = 0

    def judge_line(self, row: int, number: int, line: bytes | None) -> Row | RowFate:
        most = int(self.config.max_row_bytes)
        if line is None:
            return self._refused(
                row, number, f"expected a row of at most {most} bytes (input.max_row_bytes), got a longer one. Split it"
            )
        if cost_of_json(line) > most_cost(most):
            reason = (
                f"expected as many values as {most} bytes (input.max_row_bytes) should hold, got more. Split the row"
            )
            return self._refused(row, number, reason)
        if not line.strip():
            return self._refused(row, number, "expected one JSON object, got an empty line. Remove it")
        try:
            record = row_json(_decoded(line.rstrip(), number))
        except InputError as e:
            return self._refused(row, number, str(e))
        except (ValueError, RecursionError) as e:
            what = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else type(e).__name__
            return self._refused(
                row, number, f"expected one JSON object, got a line that is not JSON ({what}). Correct the line"
            )
        return self.judge(row, number, record)

    def judge_text(self, row: int, number: int, line: bytes) -> Row | RowFate:
        try:
            text = _decoded(line, number).rstrip("\r\n")
        except InputError as e:
            return self._refused(row, number, str(e))
        if text.startswith("\ufeff"):  # of a file with a mark that was joined to another one
            return self._refused(
                row, number, "expected U+FEFF only where the file begins, got it where a line begins. Remove it"
            )
        if number == 0 and "\r" in text and not line.endswith(b"\n"):
            return self._refused(
                row, number, "expected lines that end with LF or CR LF, got a file whose lines end with CR. Convert it"
            )
        return self.judge(row, number, {self.config.text: text})

    def judge(self, row: int, number: int, record: Any) -> Row | RowFate:
        if isinstance(record, Unreadable):
            return self._refused(row, number, record.reason)
        if not isinstance(record, dict):
            return self._refused(row, number, f"expected a JSON object, got {kind_of(record)}")
        self._judged += 1
        if self._missing:
            self._missing = {name: setting for name, setting in self._missing.items() if name not in record}
            if self._judged == _WITHOUT_FIELD:
                self.warn_of_missing()
        key = None
        try:
            key = self._key(number, record)
            if not self._first(key):
                # Refused under the row's number: the key belongs to the first row that has it, also to a refused one.
                reason = f"expected another id in each row, got {shown(key)} again. Give the row a different id"
                return self._refused(row, number, reason)
            fields = self._content(record)
        except InputError as e:
            return self._refused(row, number, str(e), key)
        return Row(key, row, number_key=self._number_key(number), **fields)

    def warn_of_missing(self) -> None:
        """Log once the fields that a setting names, and no row had so far."""
        missing, self._missing = self._missing if self._judged else {}, {}
        for name, setting in missing.items():
            log.warning(
                "%s: expected rows with the field %s, got none in %d rows. Correct the name or remove it",
                *(setting, name, self._judged),
            )

    def _first(self, key: str) -> bool:
        if self.config.id is None:
            return True
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        seen = digest in self._seen
        self._seen.add(digest)
        return not seen

    def _default_key(self, number: int) -> str:
        return f"{self.stem}:{number:08d}" if self.stem else str(number)

    def _number_key(self, number: int) -> str:
        # Not the default key: a usable row may have that key, or an id that looks like it.
        return f"{_place_stem(self.stem)}#{number:08d}"

    def _refused(self, row: int, number: int, reason: str, key: str | None = None) -> RowFate:
        return RowFate(key=key or self._number_key(number), row=row, fate="refused", reason=reason, tries=0)

    def _key(self, number: int, record: dict[str, Any]) -> str:
        name = self.config.id
        value = record.get(name) if name is not None else None
        if value is None:
            name, value = "the key of a row without an id", self._default_key(number)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise InputError(f"{name}: expected a string or an integer, got {kind_of(value)}")
        if isinstance(value, int) and value.bit_length() > MAX_KEY:
            raise InputError(f"{name}: expected an integer of at most {MAX_KEY} bits, got {shown(value)}")
        key = str(value)
        if not key or len(key) > MAX_KEY:
            raise InputError(f"{name}: expected 1 to {MAX_KEY} characters, got {len(key)}")
        if not is_unicode(key):
            raise InputError(f"{name}: expected valid Unicode, got half of a surrogate pair. Use another id")
        stem, _, digits = key.rpartition("#")
        if "#" in key and stem in self._places and len(digits) >= 8 and digits.isascii() and digits.isdecimal():
            # A refused row without an id has such a key. A sample with this key would hide that row's refusal.
            raise InputError(f"{name}: expected a key that no refused row can have, got {shown(key)}. Use another id")
        return key

    def _content(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the row's fields: its text, messages (and tools) or token ids; loss mask and metadata."""
        c = self.config
        names = {"text": c.text, "messages": c.messages, "token_ids": c.token_ids}
        given = {kind: name for kind, name in names.items() if record.get(name) is not None}
        if len(given) != 1:
            got = " and ".join(given.values()) if given else "none of them"
            raise InputError(
                f"expected exactly one of the fields {', '.join(names.values())}, got {got}. "
                "If yours has another name, set input.text, input.messages or input.token_ids"
            )
        kind, name = next(iter(given.items()))
        most = int(c.max_row_bytes)
        value = as_messages(record[name], name, most) if kind == "messages" else record[name]
        problem = CONTENT_CHECKS[kind](value)
        if problem:
            raise InputError(f"{name}: {problem}")
        fields: dict[str, Any] = {kind: value}
        is_read = kind == "messages" or c.tools not in c.metadata
        tools = given_tools(record.get(c.tools), c.tools, most) if is_read else None
        if tools is not None and kind != "messages":
            raise InputError(
                f"{c.tools}: expected tools only with {c.messages}, whose chat template renders them, got tools with "
                f"{name}. Write the row as messages, remove its tools, or set input.tools to another name"
            )
        if tools is not None:
            fields["tools"] = as_tools(tools, c.tools)
        if record.get(c.loss_mask) is not None:
            fields["loss_mask"] = mask_of(record[c.loss_mask], c.loss_mask)
        if c.metadata:
            fields["metadata"] = json_metadata({n: record[n] for n in c.metadata if n in record})
        return fields


def _decoded(line: bytes, number: int) -> str:
    """Return the text of a line. Raises InputError for a line that is not UTF-8, or has NULs: UTF-16 may be both."""
    try:
        text = line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError:
        raise InputError("expected a line in UTF-8, got other bytes. Write it as UTF-8") from None
    if "\0" in text:
        raise InputError("expected a line in UTF-8, got NULs: it may be UTF-16 or damaged. Write it as UTF-8")
    return text


def _place_stem(label: str) -> str:
    """Return a source's label for the keys of refused rows. A file's name may be invalid Unicode."""
    return label.encode("utf-8", "backslashreplace").decode()


def _named_fields(config: InputConfig) -> dict[str, str]:
    """Return the names of fields that are not defaults, and the setting of each: the user expects rows with them."""
    defaults = InputConfig.model_fields
    named = {getattr(config, s): f"input.{s}" for s in _FIELDS if getattr(config, s) not in (None, defaults[s].default)}
    return dict.fromkeys(config.metadata, "input.metadata") | named
