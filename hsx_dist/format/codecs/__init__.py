"""Codecs, and the registry by which stored objects name them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hsx_dist.config.checks import CODEC_ENTRY_POINTS, CODEC_NAMES
from hsx_dist.errors import ConfigError, FormatError, UnknownCodec
from hsx_dist.format.codecs.base import Codec
from hsx_dist.format.codecs.fp8_token import Fp8TokenCodec
from hsx_dist.format.codecs.none import NoneCodec
from hsx_dist.format.codecs.split import SplitCodec
from hsx_dist.format.codecs.zstd import ZstdCodec
from hsx_dist.page import FLOATS

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
    """Make a codec's class known in this process under its ``name``; also a class decorator.

    Processes that are started elsewhere (Ray's writers, a reader on another machine) know it where its package names it
    as an entry point of the group ``hsx_dist.codecs``.

    Raises:
        ConfigError: it is no codec's class; its name is not of lower-case letters, digits, ``.``, ``_`` and ``-``, or
            another codec's.
    """
    missing = [name for name in ("encode", "decode", "to_dict") if not callable(getattr(codec, name, None))]
    missing += [name for name in ("name", "lossy") if not hasattr(codec, name)]
    if missing or not isinstance(codec, type):
        lacks = f"; it lacks {', '.join(missing)}" if missing else ""
        raise ConfigError(f"expected a class that is a hsx_dist.format.codecs.Codec, got {codec!r}{lacks}")
    if not isinstance(codec.name, str) or not _NAME.fullmatch(codec.name):
        raise ConfigError(
            f"expected a name of lower-case letters, digits, '.', '_', '-', got {codec.name!r}: rename it"
        )
    if type(codec.lossy) is not bool:
        raise ConfigError(f"codec {codec.name!r}: expected lossy to be True or False, got {codec.lossy!r}")
    if CODECS.setdefault(codec.name, codec) is not codec:
        raise ConfigError(f"codec {codec.name!r}: expected a name of its own, {CODECS[codec.name]} has it: rename it")
    CODEC_NAMES.add(codec.name)
    return codec


def codec_for(codec: Codec, dtype: str) -> Codec:
    """The codec of values of ``dtype`` in a part of ``codec``.

    Integers are ids, not states. A codec of states would round them, or store bytes raw that are zero.
    """
    return codec if dtype in FLOATS or isinstance(codec, NoneCodec | ZstdCodec) else _OF_INTEGERS


def codec_from_dict(d: Mapping[str, Any]) -> Codec:
    """The codec that an object says it was written with.

    Raises:
        UnknownCodec: no codec of that name is registered here.
        FormatError: the parameters are not that codec's.
    """
    name = d.get("name")
    codec = _find(name) if isinstance(name, str) else None
    if codec is None:
        raise UnknownCodec(
            f"the object was written with codec {str(name)[:80]!r}, known here: {', '.join(sorted(CODECS))}; install "
            "the package that has it, register it with hsx_dist.register_codec, or use a newer hsx_dist"
        )
    try:
        return codec(**{str(k): v for k, v in d.items() if k != "name"})
    except (TypeError, ValueError) as e:
        raise FormatError(f"codec {name}: its parameters {str(dict(d))[:200]} are not understood: {e}") from e


def resolve_codec(value: str | Mapping[str, Any]) -> Codec:
    """The codec that a user asked for: ``"split"`` or ``{"name": "zstd", "level": 3}``. ``ConfigError`` otherwise."""
    d: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
    name = d.get("name")
    try:
        if not isinstance(name, str) or _find(name) is None:
            near = difflib.get_close_matches(str(name), CODECS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"codec: expected one of {', '.join(sorted(CODECS))}, got {name!r}{hint}")
        return codec_from_dict(d)
    except FormatError as e:
        raise ConfigError(f"codec: {e}") from e


def _find(name: str) -> type[Codec] | None:
    """The class of that name, where there is one. ``UnknownCodec`` where a package names one that cannot be had."""
    if name not in CODECS:
        for found in entry_points(group=CODEC_ENTRY_POINTS, name=name):
            try:
                register_codec(found.load())
            except Exception as e:  # somebody else's module: anything may come of it
                raise UnknownCodec(
                    f"codec {name!r}: an installed package has it at {found.value}, and it cannot be had: "
                    f"{type(e).__name__}: {e}; mend or update that package"
                ) from e
    return CODECS.get(name)
