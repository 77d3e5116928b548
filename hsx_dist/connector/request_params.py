"""Options of one request in its ``kv_transfer_params``. They are read once and checked; no value fails the engine.

Other connectors share the namespace, hence the prefix ``hidden_states_``. Only a wrong value is ignored: the request is
stored as if the value were absent. ``hidden_states_meta["refused"]`` of the answer gives the reason.

This runs on the scheduler's thread, between the steps of all clients. Lengths are compared with their limits before a
value is iterated. So the limits and the prompt bound the cost of a request, regardless of the values that a client
sends.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from hsx_dist.format.markers import OBJECT, RESERVED, forms, is_of_a_key, is_of_a_run
from hsx_dist.format.names import MAX_KEY
from hsx_dist.json_limits import json_text
from hsx_dist.page import HIDDEN_STATES, object_name, sample_key
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.text import bounded, printable

PREFIX = "hidden_states_"
PARAMS = "kv_transfer_params"
KNOWN = {"key", "path", "layers", "points", "tokens", "save", "row", "content", "loss_mask", "metadata"}
#: Known names. ``refused`` may have these, and a few unknown names that clients sent.
OURS = {PARAMS, "include_output_tokens", *(PREFIX + name for name in KNOWN)}
#: Number of parameters that are compared with the known names.
MAX_PARAMS = 64
#: Number of unknown names in an answer.
MAX_UNKNOWN = 8
#: Characters of a name or a value that an answer shows.
MAX_NAME = 80
#: Readers get a sample's metadata with its part's header, and every page carries it.
MAX_METADATA_BYTES = 64 << 10
#: More than the 64 levels that each field of a job's row may have, so that a row that a driver accepts is accepted
#: here.
MAX_METADATA_DEPTH = 72
#: A file name may have 255 bytes, and the names of an object's markers are longer than its own.
MAX_COMPONENT_BYTES = 240
#: Names in a path, including folders. Folders are made within a step and are not removed.
MAX_PATH_NAMES = 8
#: UTF-8 bytes of a path with the output's URL before it. S3 and GCS allow 1,024, for the markers' names too.
MAX_URL_BYTES = 1000
#: A request id that a sample's name may begin with, and the random digits that the engine appends. The digits are
#: dropped: a client that knows the id of a live request could address that request.
_PLAIN_ID = re.compile(r"([0-9A-Za-z_][0-9A-Za-z_.-]{0,89}?)(?:-[0-9a-f]{8})?")

#: vLLM's OpenAI server names the i-th prompt of a completion ``cmpl-ID-i``, and the engine adds 8 random digits.
_BATCH = re.compile(r"cmpl-.*-(\d{1,9})-[0-9a-f]{8}", re.DOTALL)
_CONTENT = re.compile(r"[0-9a-f]{16}")
#: With ``n`` > 1 the j-th choice's id is ``j_`` and the request's id.
_CHOICE = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)


def place(request_id: str) -> tuple[int, int]:
    """Return (prompt, choice) of an engine's request id: its indices in the client's request, both from 0."""
    if len(request_id) > MAX_KEY:
        # The indices are at both ends of the id. The expressions below would scan a long id completely.
        request_id = request_id[: MAX_KEY // 2] + request_id[-MAX_KEY // 2 :]
    choice = _CHOICE.fullmatch(request_id)
    batch = _BATCH.fullmatch(choice.group(2) if choice else request_id)
    return (int(batch.group(1)) if batch else 0), (int(choice.group(1)) if choice else 0)


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Every ``step``-th token from ``start`` to before ``stop``; negative numbers count from the end.

    ``kind`` ``loss_mask``: the tokens whose mask is 1 instead. ``mean``: the mean of all tokens, as one row.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1
    kind: Literal["range", "loss_mask", "mean"] = "range"

    def of(self, total: int) -> range:
        """Return the positions of the selected tokens among ``total``. Does not apply the request's mask."""
        return range(*slice(self.start, self.stop, self.step).indices(total))

    @classmethod
    def read(cls, value: Any) -> TokenSelection:
        """Parse ``[start, stop]``, ``[start, stop, step]``, ``"last"``, ``"stride:N"``, ``"loss_mask"``, ``"mean"`` or
        ``"all"``; ``stop`` may be None.

        Raises:
            ValueError: any other value.
        """
        if value == "all":
            return ALL
        if value == "last":
            return cls(-1)
        if value == "loss_mask" or value == "mean":
            return cls(kind=value)
        if isinstance(value, str) and (m := re.fullmatch(r"stride:(\d{1,9})", value)) and int(m.group(1)) > 0:
            return cls(step=int(m.group(1)))
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) in (2, 3):
            start, stop, *rest = value
            step = rest[0] if rest else 1
            if _whole(start) and (stop is None or _whole(stop)) and _whole(step) and step > 0:
                return cls(start, stop, step)
        raise ValueError(
            "expected [start, stop], [start, stop, step > 0], 'all', 'last', 'stride:N', 'loss_mask' or 'mean', got "
            f"{_shown(value)}"
        )


ALL = TokenSelection()


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The resolved options of a request.

    ``id``: the connector's own id of the request, random, so that no client can choose or guess it. ``path``: the
    object's name under the output, if the client chose a path that is not the object name of a key.
    """

    id: str
    key: str
    path: str | None = None
    #: The client gave a path that is the object name of ``key``. It is treated as the key, but claims no key.
    by_path: bool = False
    save: bool = True
    #: For each stored point its layers, in the requested order.
    points: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: TokenSelection = ALL
    include_output_tokens: bool = False
    row: int | None = None
    content: str = ""  # ``Segment.content``
    #: 0 or 1 for each token of the prompt, uint8.
    loss_mask: np.ndarray[Any, Any] | None = None
    metadata: str = ""  # a JSON object as text
    #: The client gave the key or the path. If False, ``key`` is ``id``.
    chosen: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The stored layers of the hidden states."""
        return self.points.get(HIDDEN_STATES, ())

    @property
    def name(self) -> str:
        """The object's name under the output, for one object per sample."""
        return self.path or object_name(self.key) + OBJECT


def own_id(request_id: str) -> str:
    """Return a random id for a request of the engine. It begins with the engine's id, if that is short and plain."""
    plain = _PLAIN_ID.fullmatch(request_id)
    return f"{plain.group(1)}-{uuid4().hex}" if plain else uuid4().hex


def read_request_params(
    request_id: str,
    params: Any,
    *,
    prompt_tokens: int,
    captured: Mapping[str, tuple[int, ...]],
    output: str,
    allow_custom_path: bool,
    include_output_tokens: bool,
) -> RequestParams:
    """Read options from a request's ``kv_transfer_params``. Raises nothing: ``refused`` has the reasons of wrong
    values.

    ``captured``: for each point that the engine captures, its layers.
    """
    refused: dict[str, str] = {}
    if not isinstance(params, Mapping):
        if params is not None:
            refused[PARAMS] = f"expected an object, got {_shown(params)}"
        params = {}
    _note_unknown(params, refused)

    read = partial(_read, params, refused)
    own = own_id(request_id)
    prompt, choice = place(request_id)
    key = read("hidden_states_key", None, lambda v: sample_key(_key(v), prompt=prompt, choice=choice))
    path = read("hidden_states_path", None, lambda v: custom_name(v, output, allow_custom_path, prompt, choice))
    if key is not None and path is not None:
        for name in ("hidden_states_key", "hidden_states_path"):
            refused[name] = "expected hidden_states_key or hidden_states_path, got both. Give one of them"
        key = path = None
    # Such a path is the object name of a key: ``object_name`` returns the same name for it.
    by_path = path is not None and is_of_a_key(path)
    return RequestParams(
        id=own,
        key=key or (own if path is None else path.removesuffix(OBJECT)),
        path=None if by_path else path,
        by_path=by_path,
        save=read("hidden_states_save", True, _flag),
        points=_points_of(
            read("hidden_states_points", None, lambda v: _points(v, captured)),
            read("hidden_states_layers", None, lambda v: _layers(v, captured.get(HIDDEN_STATES, ()))),
            captured,
        ),
        tokens=read("hidden_states_tokens", ALL, TokenSelection.read),
        include_output_tokens=read("include_output_tokens", include_output_tokens, _flag),
        row=read("hidden_states_row", None, _row),
        content=read("hidden_states_content", "", _content),
        loss_mask=read("hidden_states_loss_mask", None, lambda v: _mask(v, prompt_tokens)),
        metadata=read("hidden_states_metadata", "", _metadata),
        chosen=key is not None or path is not None,
        refused=refused,
    )


def _read(params: Mapping[Any, Any], refused: dict[str, str], name: str, default: Any, parse: Any) -> Any:
    """Return the parsed value. Returns ``default`` without a value, or with an entry in ``refused`` for a wrong one."""
    value = params.get(name)
    if value is None:
        return default
    try:
        return parse(value)
    except ValueError as e:
        refused[name] = bounded(e, 500)
    except Exception as e:  # noqa: BLE001 - a client's value must not end the engine
        refused[name] = f"could not be read: {type(e).__name__}"
    return default


def _note_unknown(params: Mapping[Any, Any], refused: dict[str, str]) -> None:
    """Refuse unknown names with ``PREFIX``: at most ``MAX_UNKNOWN`` of those among the first ``MAX_PARAMS``."""
    if len(params) > MAX_PARAMS:
        refused[PARAMS] = (
            f"expected at most {MAX_PARAMS} parameters, got {len(params)}; unknown names after these are not reported"
        )
    known = ", ".join(sorted(OURS - {PARAMS, "include_output_tokens"}))
    unknown = 0
    for name in islice(params, MAX_PARAMS):
        if isinstance(name, str) and name.startswith(PREFIX) and (len(name) > MAX_NAME or name not in OURS):
            unknown += 1
            if unknown <= MAX_UNKNOWN:
                refused[printable(name, MAX_NAME)] = f"expected one of {known}"


def custom_name(value: Any, output: str, allowed: bool, prompt: int = 0, choice: int = 0) -> str:
    """Return the object's name, relative to ``output``, for a path that a client chose.

    For a later prompt or choice of the request, ``sample_key`` appends its indices before the suffix.

    Raises:
        ValueError: custom paths are off, or this path is not a name under ``output``.
    """
    if not allowed:
        raise ValueError("expected no path, as allow_custom_save_path is off, got one; the default path is used")
    if not isinstance(value, str) or not value or len(value) > MAX_KEY:
        raise ValueError(f"expected a path of 1 to {MAX_KEY} characters under {output}, got {_shown(value)}")
    base = output.rstrip("/") + "/"
    name = _unicode(value).removeprefix(base)
    parts = name.split("/")
    if name.startswith("/") or "://" in name or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"expected a path under {output}, got {_shown(value)}")
    if len(parts) > MAX_PATH_NAMES:
        raise ValueError(f"expected at most {MAX_PATH_NAMES} names in a path, got {len(parts)}")
    if any(not c.isprintable() or c in "\\?#*[]" for c in name):
        raise ValueError(f"expected a path without control characters and \\ ? # * [ ], got {_shown(value)}")
    if "::" in name or any(p.endswith((" ", ".")) for p in parts):
        # A reader that opens the folder as a URL would refuse it, or open another folder.
        raise ValueError(f"expected names without :: that do not end in a space or dot, got {_shown(value)}")
    stem, suffix = posixpath.splitext(name)
    given, name = name, sample_key(stem, prompt=prompt, choice=choice) + suffix
    # Before the first ``forms``: its time grows with the square of a name's combining marks.
    if any(len(p.encode()) > MAX_COMPONENT_BYTES for p in name.split("/")):
        raise ValueError(f"expected names of at most {MAX_COMPONENT_BYTES} bytes, got {_shown(value)}")
    if len(f"{base}{name}".encode()) > MAX_URL_BYTES:
        raise ValueError(f"expected a path of at most {MAX_URL_BYTES} bytes, {base} included, got {_shown(value)}")
    if OBJECT in forms(given):
        raise ValueError(f"expected a name before {OBJECT}, got {_shown(value)}")  # its sample would have no key
    same = [form.split("/") for form in forms(name)]
    if any(form[-1].endswith(RESERVED) for form in same):
        # A client must not replace the markers and locks of other objects.
        raise ValueError(f"expected a path that does not end in {', '.join(RESERVED)}, got {_shown(value)}")
    if any(p.endswith((OBJECT, *RESERVED)) for form in same for p in form[:-1]):
        raise ValueError(f"expected folders that do not end in {', '.join((OBJECT, *RESERVED))}, got {_shown(value)}")
    if any(p in ("", ".", "..") or p.startswith(UNFINISHED) for form in same for p in form):
        raise ValueError(f"expected names that do not begin with {UNFINISHED}, got {_shown(value)}")
    if is_of_a_run(name):
        raise ValueError(f"expected a path that differs from the names of a run's objects, got {_shown(value)}")
    if is_of_a_key(name) and object_name(name.removesuffix(OBJECT)) + OBJECT != name:
        # Some file systems treat this name as that of a key's object, and that key is unknown here.
        raise ValueError(f"expected a path that does not look like the object of a key, got {_shown(value)}")
    return name


def _key(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_KEY:
        raise ValueError(f"expected a string of 1 to {MAX_KEY} characters, got {_shown(value)}")
    return _unicode(value)


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected text without lone surrogates, got {_shown(value)}") from None
    return value


def _mask(value: Any, prompt_tokens: int) -> np.ndarray[Any, Any]:
    """Parse a list of 0 and 1, or bytes of them (from a job)."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"expected a list of 0 and 1, got {_shown(value)}")
    if len(value) != prompt_tokens:
        raise ValueError(
            f"expected {prompt_tokens} entries, one for each token of the prompt, got {len(value)}; no mask is stored"
        )
    if isinstance(value, bytes):
        mask = np.frombuffer(value, np.uint8)
    elif value and set(map(type, value)) <= {int, bool} and min(value) >= 0 and max(value) <= 1:
        mask = np.frombuffer(bytes(value), np.uint8)
    else:
        raise ValueError(f"expected a list of 0 and 1, got {_shown(value)}")
    if not len(mask) or mask.max() > 1:
        raise ValueError(f"expected 0 or 1 for each token of the prompt, got {_shown(value)}")
    return mask


def _metadata(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {_shown(value)}")
    return _shared(json_text(value, max_bytes=MAX_METADATA_BYTES, max_depth=MAX_METADATA_DEPTH))


@lru_cache(maxsize=8)
def _shared(text: str) -> str:
    """Return one object for equal texts: the choices and prompts of a client's request have the same metadata."""
    return text


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return value


def _content(value: Any) -> str:
    if not isinstance(value, str) or not _CONTENT.fullmatch(value):
        raise ValueError(f"expected 16 hex digits, the hash of the row, got {_shown(value)}")
    return value


def _row(value: Any) -> int:
    if not _whole(value) or value < 0:
        raise ValueError(f"expected a row number, got {_shown(value)}")
    return int(value)


def _layers(value: Any, captured: tuple[int, ...], point: str = "") -> tuple[int, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not 0 < len(value) <= len(captured) or not all(_whole(v) and v in captured for v in value):
        raise ValueError(f"expected some of the captured layers {list(captured)}{point}, got {_shown(value)}")
    if len(set(value)) != len(value):
        raise ValueError(f"expected each of the layers{point} once, got {_shown(value)}")
    return tuple(int(v) for v in value)


def _points(value: Any, captured: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Parse ``{"q": [15], "z": "all"}``, or ``"all"``."""
    if value == "all":
        return dict(captured)
    named = isinstance(value, Mapping) and len(value) > 0
    for wrong in (n for n in value if n not in captured) if named else [value]:
        raise ValueError(f"expected some of the captured points {', '.join(captured)}, or 'all', got {_shown(wrong)}")
    return {
        name: layers if (wanted := value[name]) == "all" else _layers(wanted, layers, f" of {name}")
        for name, layers in captured.items()
        if name in value
    }


def _points_of(
    points: dict[str, tuple[int, ...]] | None, layers: tuple[int, ...] | None, captured: Mapping[str, tuple[int, ...]]
) -> Mapping[str, tuple[int, ...]]:
    """Combine both parameters. Without either: the hidden states if they are captured, else all points.

    ``layers`` adds hidden states to ``points``, or selects their layers.
    """
    if points is None and layers is None:
        return {HIDDEN_STATES: captured[HIDDEN_STATES]} if HIDDEN_STATES in captured else captured
    asked = (points or {}) if layers is None else {**(points or {}), HIDDEN_STATES: layers}
    return {name: asked[name] for name in captured if name in asked}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 62


def _shown(value: Any) -> str:
    """Return a value as text for an answer. Large values are shown by their size only."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_NAME else f"a string of {len(value)} characters"
    if value is None or isinstance(value, (bool, float)) or _whole(value):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(_whole(v) for v in value):
        return repr(value)
    kind = printable(type(value).__name__, MAX_NAME)
    return f"a {kind} of {len(value)}" if isinstance(value, Sized) else f"a {kind}"
