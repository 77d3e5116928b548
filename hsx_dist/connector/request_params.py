"""What one request asks for, in its ``kv_transfer_params``: read once, checked, and never a reason to fail the engine.

The namespace is shared with other connectors, hence the prefix ``hidden_states_``. A wrong value is set aside alone:
the request is stored as if it had not been given, and ``hidden_states_meta["refused"]`` of the answer says why.

This runs on the scheduler's thread, between the steps of all clients. Lengths are compared with their limits before
anything is iterated, so that the cost of a request depends on the limits and its prompt, not on what was sent.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from hsx_dist.format.markers import OBJECT, RESERVED, folded, is_of_a_key, is_of_a_run
from hsx_dist.json_limits import json_text
from hsx_dist.page import HIDDEN_STATES, object_name, sample_key
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.text import printable

PREFIX = "hidden_states_"
PARAMS = "kv_transfer_params"
KNOWN = {"key", "path", "layers", "points", "tokens", "save", "row", "loss_mask", "metadata"}
#: What ``refused`` may name, besides names that clients made up.
OURS = {PARAMS, "include_output_tokens", *(PREFIX + name for name in KNOWN)}
#: So many parameters are compared with the known names, and so many unknown ones are answered, each cut.
MAX_PARAMS = 64
MAX_UNKNOWN = 8
MAX_NAME = 80
#: A sample's metadata is read with its part's header, and travels with every page.
MAX_METADATA_BYTES = 64 << 10
#: More than a job's rows may have (64 in each of their fields): what a driver takes is not refused here.
MAX_METADATA_DEPTH = 72
#: Characters of a key or a path.
MAX_KEY = 1024
#: A file name may have 255 bytes, and an object's markers add to its own.
MAX_COMPONENT_BYTES = 240
#: Names in a path, folders included: folders are made within a step, and stay.
MAX_PATH_NAMES = 8
#: UTF-8 bytes of a path with the output's URL before it: S3 and GCS take 1,024, also of the markers' names.
MAX_URL_BYTES = 1000
#: Characters of an engine's request id that are kept. A client may send an id of megabytes.
MAX_ID = 256

#: vLLM's OpenAI server names the i-th prompt of a completion ``cmpl-ID-i``, and the engine adds 8 random digits.
_BATCH = re.compile(r"cmpl-.*-(\d{1,9})-[0-9a-f]{8}")
#: With ``n`` > 1 the j-th choice's id is the request's, led by ``j_``.
_CHOICE = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)


def place(request_id: str) -> tuple[int, int]:
    """(prompt, choice) of an engine's request id: which result of its client's request it is, both from 0."""
    if len(request_id) > MAX_KEY:
        # What decides is at both ends, and the expressions below read all of it.
        request_id = request_id[: MAX_KEY // 2] + request_id[-MAX_KEY // 2 :]
    choice = _CHOICE.fullmatch(request_id)
    batch = _BATCH.fullmatch(choice.group(2) if choice else request_id)
    return (int(batch.group(1)) if batch else 0), (int(choice.group(1)) if choice else 0)


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Every ``step``-th token from ``start`` to before ``stop``; negative numbers count from the end.

    ``kind`` ``loss_mask``: those whose mask is 1 instead; ``mean``: all, of which one row is made, their mean.
    """

    start: int = 0
    stop: int | None = None
    step: int = 1
    kind: Literal["range", "loss_mask", "mean"] = "range"

    def of(self, total: int) -> range:
        """Positions of the tokens among ``total``, as far as the request's mask does not decide."""
        return range(*slice(self.start, self.stop, self.step).indices(total))

    @classmethod
    def read(cls, value: Any) -> TokenSelection:
        """``[start, stop]``, ``[start, stop, step]``, ``"last"``, ``"stride:N"``, ``"loss_mask"``, ``"mean"`` or
        ``"all"``; ``stop`` may be None.

        Raises:
            ValueError: anything else.
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
    """What a request asks for, resolved.

    ``id``: the request's, cut where it is long; unique among all requests. ``path``: the object's name under the
    output, where the client chose one that no key has.
    """

    id: str
    key: str
    path: str | None = None
    #: The client gave a path whose object is that of ``key``. It is treated as the key, and claims none.
    by_path: bool = False
    save: bool = True
    #: For each point that is stored its layers, in the order asked for.
    points: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: TokenSelection = ALL
    include_output_tokens: bool = False
    row: int | None = None
    #: 0 or 1 for each token of the prompt, uint8.
    loss_mask: np.ndarray[Any, Any] | None = None
    metadata: str = ""  # a JSON object as text
    #: The client gave the key or the path; else it is the engine's own request id, which nobody else has.
    chosen: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the hidden states that are stored."""
        return self.points.get(HIDDEN_STATES, ())

    @property
    def name(self) -> str:
        """The object's name under the output where every sample is an object."""
        return self.path or object_name(self.key) + OBJECT


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
    """Options from a request's ``kv_transfer_params``. Raises nothing: what is wrong is in ``refused``.

    ``captured``: for each point that the engine captures its layers.
    """
    refused: dict[str, str] = {}
    if not isinstance(params, Mapping):
        if params is not None:
            refused[PARAMS] = f"expected an object, got {_shown(params)}"
        params = {}
    _note_unknown(params, refused)

    read = partial(_read, params, refused)
    own_id = request_id if len(request_id) <= MAX_ID else f"{request_id[:MAX_ID]}~{uuid4().hex}"
    prompt, choice = place(request_id)
    key = read("hidden_states_key", None, lambda v: sample_key(_key(v), prompt=prompt, choice=choice))
    path = read("hidden_states_path", None, lambda v: custom_name(v, output, allow_custom_path, prompt, choice))
    if key is not None and path is not None:
        for name in ("hidden_states_key", "hidden_states_path"):
            refused[name] = "expected hidden_states_key or hidden_states_path, got both. Give one of them"
        key = path = None
    # The object of such a path is that of the key. ``object_name`` makes the same name of it.
    by_path = path is not None and is_of_a_key(path)
    return RequestParams(
        id=own_id,
        key=key or (own_id if path is None else path.removesuffix(OBJECT)),
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
        loss_mask=read("hidden_states_loss_mask", None, lambda v: _mask(v, prompt_tokens)),
        metadata=read("hidden_states_metadata", "", _metadata),
        chosen=key is not None or path is not None,
        refused=refused,
    )


def _read(params: Mapping[Any, Any], refused: dict[str, str], name: str, default: Any, parse: Any) -> Any:
    """The parsed value; ``default`` where there is none, or where it cannot be parsed, which ``refused`` then says."""
    value = params.get(name)
    if value is None:
        return default
    try:
        return parse(value)
    except ValueError as e:
        refused[name] = printable(e, 500)
    except Exception as e:  # noqa: BLE001 - an engine must not die of what a client sends
        refused[name] = f"could not be read: {type(e).__name__}"
    return default


def _note_unknown(params: Mapping[Any, Any], refused: dict[str, str]) -> None:
    """Refuse names with our prefix that mean nothing: a few of those among the first ``MAX_PARAMS``."""
    if len(params) > MAX_PARAMS:
        refused[PARAMS] = (
            f"expected at most {MAX_PARAMS} parameters, got {len(params)}; unknown names beyond are not reported"
        )
    known = ", ".join(sorted(OURS - {PARAMS, "include_output_tokens"}))
    unknown = 0
    for name in islice(params, MAX_PARAMS):
        if isinstance(name, str) and name.startswith(PREFIX) and (len(name) > MAX_NAME or name not in OURS):
            unknown += 1
            if unknown <= MAX_UNKNOWN:
                refused[printable(name, MAX_NAME)] = f"expected one of {known}"


def custom_name(value: Any, output: str, allowed: bool, prompt: int = 0, choice: int = 0) -> str:
    """The object's name, relative to ``output``, of a path that a client chose; of a later prompt or choice of its
    request with what ``sample_key`` appends, before the suffix.

    Raises:
        ValueError: custom paths are off, or this one is not a name under ``output``.
    """
    if not allowed:
        raise ValueError("custom paths are off (allow_custom_save_path); the default is used")
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
        # A reader that opens the folder as a URL refuses it, or reads another one.
        raise ValueError(f"expected names without :: that do not end in a space or dot, got {_shown(value)}")
    stem, suffix = posixpath.splitext(name)
    name = sample_key(stem, prompt=prompt, choice=choice) + suffix
    same = folded(name).split("/")
    if same[-1].endswith(RESERVED):
        # A client must not replace an object's lock or markers.
        raise ValueError(f"expected a path that does not end in {', '.join(RESERVED)}, got {_shown(value)}")
    if any(p.endswith((OBJECT, *RESERVED)) for p in same[:-1]):
        raise ValueError(f"expected folders that do not end as objects and their markers do, got {_shown(value)}")
    if any(p in ("", ".", "..") or p.startswith(UNFINISHED) for p in same) or any(
        len(p.encode()) > MAX_COMPONENT_BYTES for p in name.split("/")
    ):
        raise ValueError(
            f"expected names of at most {MAX_COMPONENT_BYTES} bytes that do not begin with {UNFINISHED}, got "
            f"{_shown(value)}"
        )
    if len(f"{base}{name}".encode()) > MAX_URL_BYTES:
        raise ValueError(f"expected a path of at most {MAX_URL_BYTES} bytes, {base} included, got {_shown(value)}")
    if is_of_a_run(name):
        raise ValueError(f"expected a path that is not the name of a run's own object, got {_shown(value)}")
    if is_of_a_key(name) and object_name(name.removesuffix(OBJECT)) + OBJECT != name:
        # A file system could store it in the place of a key's object, and the key is unknown here.
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
    """From bytes of 0 and 1 (a job's), or a list of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"expected a list of 0 and 1, got {_shown(value)}")
    if len(value) != prompt_tokens:
        raise ValueError(
            f"expected {prompt_tokens} entries, one for each token of the prompt, got {len(value)}; none is stored"
        )
    if isinstance(value, bytes):
        mask = np.frombuffer(value, np.uint8)
    elif all(type(v) in (int, bool) for v in value):
        mask = np.array([v if v in (0, 1) else 2 for v in value], np.uint8)
    else:
        raise ValueError(f"expected a list of 0 and 1, got {_shown(value)}")
    if not len(mask) or mask.max() > 1:
        raise ValueError(f"expected 0 or 1 for each token of the prompt, got {_shown(value)}")
    return mask


def _metadata(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {_shown(value)}")
    return json_text(value, max_bytes=MAX_METADATA_BYTES, max_depth=MAX_METADATA_DEPTH)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return value


def _row(value: Any) -> int:
    if not _whole(value) or value < 0:
        raise ValueError(f"expected a row number, got {_shown(value)}")
    return int(value)


def _layers(value: Any, captured: tuple[int, ...]) -> tuple[int, ...]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not 0 < len(value) <= len(captured)
        or not all(_whole(v) for v in value)
        or len(set(value)) != len(value)
        or not set(value) <= set(captured)
    ):
        raise ValueError(f"expected some of the captured layers {list(captured)}, each once, got {_shown(value)}")
    return tuple(int(v) for v in value)


def _points(value: Any, captured: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """From ``{"q": [15], "z": "all"}``, or ``"all"``."""
    if value == "all":
        return dict(captured)
    if not isinstance(value, Mapping) or not 0 < len(value) <= len(captured) or not all(n in captured for n in value):
        raise ValueError(f"expected some of the captured points {', '.join(captured)}, or 'all', got {_shown(value)}")
    return {
        name: layers if (wanted := value[name]) == "all" else _layers(wanted, layers)
        for name, layers in captured.items()
        if name in value
    }


def _points_of(
    points: dict[str, tuple[int, ...]] | None, layers: tuple[int, ...] | None, captured: Mapping[str, tuple[int, ...]]
) -> Mapping[str, tuple[int, ...]]:
    """What both parameters ask for; without either hidden states if they are captured, else everything. ``layers`` adds
    hidden states to ``points``, or chooses among theirs."""
    if points is None and layers is None:
        return {HIDDEN_STATES: captured[HIDDEN_STATES]} if HIDDEN_STATES in captured else captured
    asked = (points or {}) if layers is None else {**(points or {}), HIDDEN_STATES: layers}
    return {name: asked[name] for name in captured if name in asked}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 62


def _shown(value: Any) -> str:
    """A value as it may stand in an answer. Of large ones only the size is read."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_NAME else f"a string of {len(value)} characters"
    if value is None or isinstance(value, (bool, float)) or _whole(value):
        return repr(value)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(_whole(v) for v in value):
        return repr(value)
    kind = printable(type(value).__name__, MAX_NAME)
    return f"a {kind} of {len(value)}" if isinstance(value, Sized) else f"a {kind}"
