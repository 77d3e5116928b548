"""Codecs, and the registry that maps the names in stored objects to them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from hsx_dist.config.checks import CODEC_ENTRY_POINTS, CODEC_NAMES
from hsx_dist.errors import ConfigError, FormatError, UnknownCodec
from hsx_dist.format.codecs.base import Codec
from hsx_dist.format.codecs.fp8_token import Fp8TokenCodec
from hsx_dist.format.codecs.none import NoneCodec
from hsx_dist.format.codecs.split import SplitCodec
from hsx_dist.format.codecs.zstd import ZstdCodec
from hsx_dist.format.json_objects import shown
from hsx_dist.page import FLOATS
from hsx_dist.text import bounded, head, shown_error

#: Name → class. The keys of ``to_dict`` besides ``name`` are the class's arguments.
CODECS: dict[str, type[Codec]] = {c.name: c for c in (NoneCodec, ZstdCodec, SplitCodec, Fp8TokenCodec)}

__all__ = [
    "CODECS",
    "Codec",
    "Fp8TokenCodec",
    "NoneCodec",
    "SplitCodec",
    "ZstdCodec",
    "codec_for",
    "codec_from_dict",
    "register_codec",
    "resolve_codec",
]

_OF_INTEGERS = ZstdCodec()
_C = TypeVar("_C", bound=type[Codec])
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def register_codec(codec: _C) -> _C:
    """Register a codec class under its ``name`` in this process. Also a class decorator.

    Other processes (Ray's writers, a reader on another machine) find the codec only if its package declares an entry
    point in the group ``hsx_dist.codecs``.

    Raises:
        ConfigError: ``codec`` is not a codec class; its name has characters other than lower-case letters, digits,
            ``.``, ``_`` and ``-``; or another codec has this name.

    Example:
        >>> from hsx_dist.format.codecs import NoneCodec
        >>> @register_codec
        ... class MyCodec(NoneCodec):
        ...     name = "my-codec"
    """
    missing = [name for name in ("encode", "decode", "to_dict") if not callable(getattr(codec, name, None))]
    missing += [name for name in ("name", "lossy") if not hasattr(codec, name)]
    if missing or not isinstance(codec, type):
        lacks = f". Define {', '.join(missing)}" if missing else ""
        raise ConfigError(f"expected a class that is a hsx_dist.format.codecs.Codec, got {codec!r}{lacks}")
    if not isinstance(codec.name, str) or not _NAME.fullmatch(codec.name):
        raise ConfigError(
            f"expected a name of lower-case letters, digits, '.', '_', '-', got {codec.name!r}. Rename it"
        )
    if type(codec.lossy) is not bool:
        raise ConfigError(f"codec {codec.name!r}: expected lossy to be True or False, got {codec.lossy!r}")
    if CODECS.setdefault(codec.name, codec) is not codec:
        raise ConfigError(
            f"codec {codec.name!r}: expected a name that is not in use, got that of {CODECS[codec.name]}. Rename it"
        )
    CODEC_NAMES.add(codec.name)
    return codec


def codec_for(codec: Codec, dtype: str) -> Codec:
    """The codec for values of ``dtype`` in a part with ``codec``.

    Integers are ids, not states. A codec for states would round them, or store their zero bytes uncompressed.
    """
    return codec if dtype in FLOATS or isinstance(codec, NoneCodec | ZstdCodec) else _OF_INTEGERS


def codec_from_dict(d: Mapping[str, Any]) -> Codec:
    """The codec that an object names, with its parameters.

    Raises:
        UnknownCodec: no codec of that name is registered here.
        FormatError: the codec does not accept the parameters.
    """
    name = d.get("name")
    codec = _find(name) if isinstance(name, str) else None
    if codec is None:
        raise UnknownCodec(
            f"expected a codec that is known here ({', '.join(sorted(CODECS))}), got {head(str(name), 80)!r}. "
            "Install its package, register it with hsx_dist.register_codec, or use a newer hsx_dist"
        )
    try:
        return codec(**{str(k): v for k, v in d.items() if k != "name"})
    except (TypeError, ValueError) as e:
        raise FormatError(
            f"codec {name}: expected parameters that it accepts, got {bounded(dict(d), 200)}: "
            f"{bounded(e, 200)}. Correct them"
        ) from e


def resolve_codec(value: str | Mapping[str, Any]) -> Codec:
    """The codec that a user asked for: ``"split"`` or ``{"name": "zstd", "level": 3}``. ``ConfigError`` otherwise."""
    d: Mapping[str, Any] = value if isinstance(value, Mapping) else {"name": value}
    name = d.get("name")
    try:
        if not isinstance(name, str) or _find(name) is None:
            near = difflib.get_close_matches(shown(name), CODECS, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"codec: expected one of {', '.join(sorted(CODECS))}, got {shown(name)}{hint}. Choose one of them"
            )
        return codec_from_dict(d)
    except FormatError as e:
        raise ConfigError(f"codec: {e}") from e


@cache
def _installed() -> dict[str, EntryPoint]:
    """The entry points of codecs, by name. Read once: a look takes 10 ms, and each object may name an unknown codec."""
    return {point.name: point for point in entry_points(group=CODEC_ENTRY_POINTS)}


def _find(name: str) -> type[Codec] | None:
    """The class of that name, or None. ``UnknownCodec`` when the class that an entry point names cannot be loaded."""
    if name not in CODECS:
        found = _installed().get(name)
        if found is not None:
            try:
                register_codec(found.load())
            except Exception as e:  # third-party code: importing it can raise anything
                raise UnknownCodec(
                    f"codec {name!r}: expected entry point {found.value} to be importable, got {shown_error(e)}. "
                    "Repair or update the package"
                ) from e
    return CODECS.get(name)
