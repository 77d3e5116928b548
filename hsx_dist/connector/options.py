"""What one request asks for, in its ``kv_transfer_params``: read once, checked, and never a reason to fail the engine.

The namespace is shared with other connectors, hence the prefix ``hidden_states_``. A wrong value is set aside alone:
the request is stored as if it had not been given, and ``hidden_states_meta["refused"]`` of the answer says why.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hsx_dist.format.companions import OBJECT, RESERVED
from hsx_dist.page import object_name, sample_key
from hsx_dist.store.local import UNFINISHED

PREFIX = "hidden_states_"
PARAMS = "kv_transfer_params"
KNOWN = {"key", "path", "layers", "tokens", "save", "row", "loss_mask", "metadata"}
#: What ``refused`` may name beside names that clients made up.
OURS = {PARAMS, "include_output_tokens", *(PREFIX + name for name in KNOWN)}
#: A sample's metadata is read with its part's header, and travels with every page.
MAX_METADATA_BYTES = 64 << 10
#: A file name may have 255 bytes, and an object's companions add to its own.
MAX_COMPONENT_BYTES = 240

#: vLLM's OpenAI server names the i-th prompt of a completion ``cmpl-ID-i``, and the engine adds 8 random digits.
_BATCH = re.compile(r"cmpl-.*-(\d{1,9})-[0-9a-f]{8}")
#: With ``n`` > 1 the j-th choice's id is the request's, led by ``j_``.
_CHOICE = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)


def place(request_id: str) -> tuple[int, int]:
    """(prompt, choice) of an engine's request id: which result of its client's request it is, both from 0."""
    choice = _CHOICE.fullmatch(request_id)
    batch = _BATCH.fullmatch(choice.group(2) if choice else request_id)
    return (int(batch.group(1)) if batch else 0), (int(choice.group(1)) if choice else 0)


@dataclass(frozen=True, slots=True)
class Selection:
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
    def read(cls, value: Any) -> Selection:
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
            "expected [start, stop], [start, stop, step > 0], 'all', 'last', 'stride:N', 'loss_mask' or 'mean', came "
            f"{_shown(value)}"
        )


ALL = Selection()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for, resolved. ``path``: the object's name under the output, where the client chose one."""

    key: str
    path: str | None = None
    save: bool = True
    layer_ids: tuple[int, ...] = ()
    tokens: Selection = ALL
    include_output_tokens: bool = False
    row: int | None = None
    #: 0 or 1 for each token of the prompt, uint8.
    loss_mask: np.ndarray[Any, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    #: The client gave the key or the path; else it is the engine's own request id, which nobody else has.
    chosen: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The object's name under the output where every sample is an object."""
        return self.path or object_name(self.key) + OBJECT


def read_options(
    request_id: str,
    params: Any,
    *,
    layer_ids: tuple[int, ...],
    output: str,
    allow_custom_path: bool,
    include_output_tokens: bool,
) -> RequestOptions:
    """Options from a request's ``kv_transfer_params``. Raises nothing: what is wrong is in ``refused``."""
    refused: dict[str, str] = {}
    if not isinstance(params, Mapping):
        if params is not None:
            refused[PARAMS] = f"expected an object, came {_shown(params)}"
        params = {}

    def read(name: str, default: Any, parse: Any) -> Any:
        value = params.get(name)
        if value is None:
            return default
        try:
            return parse(value)
        except ValueError as e:
            refused[name] = str(e)
        except Exception as e:  # noqa: BLE001 - an engine must not die of what a client sends
            refused[name] = f"could not be read: {type(e).__name__}"
        return default

    for name in params:
        if isinstance(name, str) and name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN:
            refused[_told(name)] = f"expected one of {', '.join(sorted(PREFIX + k for k in KNOWN))}"
    prompt, choice = place(request_id)
    key = read("hidden_states_key", None, _key)
    path = read("hidden_states_path", None, lambda v: custom_name(v, output, allow_custom_path, prompt, choice))
    if key is not None:
        name_of = sample_key(key, prompt=prompt, choice=choice)
    else:
        name_of = path.removesuffix(OBJECT) if path is not None else request_id
    return RequestOptions(
        key=name_of,
        path=path,
        save=read("hidden_states_save", True, _flag),
        layer_ids=read("hidden_states_layers", layer_ids, lambda v: _layers(v, layer_ids)),
        tokens=read("hidden_states_tokens", ALL, Selection.read),
        include_output_tokens=read("include_output_tokens", include_output_tokens, _flag),
        row=read("hidden_states_row", None, _row),
        loss_mask=read("hidden_states_loss_mask", None, _mask),
        metadata=read("hidden_states_metadata", None, _metadata),
        chosen=key is not None or path is not None,
        refused=refused,
    )


def custom_name(value: Any, output: str, allowed: bool, prompt: int = 0, choice: int = 0) -> str:
    """The object's name, relative to ``output``, of a path that a client chose; of a later prompt or choice of its
    request with what ``sample_key`` appends, before the suffix.

    Raises:
        ValueError: custom paths are off, or this one is not a name under ``output``.
    """
    if not allowed:
        raise ValueError("custom paths are off (allow_custom_save_path); the default is used")
    if not isinstance(value, str) or not value or len(value) > 1024:
        raise ValueError(f"expected a path under {output}, came {_shown(value)}")
    base = output.rstrip("/") + "/"
    name = _unicode(value).removeprefix(base)
    parts = name.split("/")
    if name.startswith("/") or "://" in name or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"expected a path under {output}, came {_shown(value)}")
    if any(ord(c) < 32 or ord(c) == 127 or c in "\\?#*[]" for c in name):
        raise ValueError(f"expected a path without control characters and \\ ? # * [ ], came {_shown(value)}")
    if name.endswith(RESERVED):
        # An object's companions are not the client's to replace.
        raise ValueError(f"expected a path that does not end in {', '.join(RESERVED)}, came {_shown(value)}")
    if any(p.endswith((OBJECT, *RESERVED)) for p in parts[:-1]):
        raise ValueError(f"expected folders that do not end as objects and their companions do, came {_shown(value)}")
    stem, suffix = posixpath.splitext(name)
    name = sample_key(stem, prompt=prompt, choice=choice) + suffix
    for part in name.split("/"):
        if part.startswith(UNFINISHED) or len(part.encode()) > MAX_COMPONENT_BYTES:
            raise ValueError(
                f"expected names of at most {MAX_COMPONENT_BYTES} bytes that do not begin with {UNFINISHED}, came "
                f"{_shown(value)}"
            )
    return name


def _key(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 1024:
        raise ValueError(f"expected a string of 1 to 1024 characters, came {_shown(value)}")
    return _unicode(value)


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected text without lone surrogates, came {_shown(value)}") from None
    return value


def _told(name: str) -> str:
    """A name that a client made up, as it may stand in an answer."""
    return name[:80].encode("ascii", "backslashreplace").decode()


def _mask(value: Any) -> np.ndarray[Any, Any]:
    """From bytes of 0 and 1 (a job's), or a list of them."""
    if isinstance(value, bytes):
        mask = np.frombuffer(value, np.uint8)
    elif isinstance(value, Sequence) and not isinstance(value, str) and all(type(v) in (int, bool) for v in value):
        mask = np.array([v if v in (0, 1) else 2 for v in value], np.uint8)
    else:
        raise ValueError(f"expected a list of 0 and 1, came {_shown(value)}")
    if not len(mask) or mask.max() > 1:
        raise ValueError(f"expected 0 or 1 for each token of the prompt, came {_shown(value)}")
    return mask


def _metadata(value: Any) -> Mapping[str, Any]:
    try:
        size = len(json.dumps(value, allow_nan=False)) if isinstance(value, Mapping) else -1
        json.dumps(value, ensure_ascii=False).encode()  # without lone surrogates, which readers may not take
    except (TypeError, ValueError, RecursionError):
        size = -1
    if not 0 <= size <= MAX_METADATA_BYTES:
        raise ValueError(f"expected an object of at most {MAX_METADATA_BYTES} bytes as JSON, came {_shown(value)}")
    return dict(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, came {_shown(value)}")
    return value


def _row(value: Any) -> int:
    if not _whole(value) or value < 0:
        raise ValueError(f"expected a row number, came {_shown(value)}")
    return int(value)


def _layers(value: Any, captured: tuple[int, ...]) -> tuple[int, ...]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not value
        or not all(_whole(v) for v in value)
        or len(set(value)) != len(value)
        or not set(value) <= set(captured)
    ):
        raise ValueError(f"expected some of the captured layers {list(captured)}, each once, came {_shown(value)}")
    return tuple(int(v) for v in value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - nested too deeply, or an object of somebody's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"
