"""Codecs, and the registry by which stored objects name them. To add one, put its class into ``CODECS``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hsx_dist.errors import ConfigError, FormatError, UnknownCodec
from hsx_dist.format.codecs.base import Codec, Plane
from hsx_dist.format.codecs.none import NoneCodec
from hsx_dist.format.codecs.split import SplitCodec
from hsx_dist.format.codecs.zstd import ZstdCodec

#: Name → class. The keys of ``to_dict`` besides ``name`` are the class's arguments.
CODECS: dict[str, type[Codec]] = {c.name: c for c in (NoneCodec, ZstdCodec, SplitCodec)}

__all__ = ["CODECS", "Codec", "NoneCodec", "Plane", "SplitCodec", "ZstdCodec", "codec_from_dict", "resolve_codec"]


def codec_from_dict(d: Mapping[str, Any]) -> Codec:
    """The codec that an object says it was written with.

    Raises:
        UnknownCodec: no codec of that name is registered here.
        FormatError: the parameters are not that codec's.
    """
    name = d.get("name")
    if not isinstance(name, str) or name not in CODECS:
        raise UnknownCodec(
            f"the object was written with codec {name!r}, known here: {', '.join(sorted(CODECS))}; "
            "register it in hsx_dist.format.codecs.CODECS or use a newer hsx_dist"
        )
    try:
        return CODECS[name](**{str(k): v for k, v in d.items() if k != "name"})
    except (TypeError, ValueError) as e:
        raise FormatError(f"codec {name}: its parameters {dict(d)!r} are not understood: {e}") from e


def resolve_codec(value: str | Mapping[str, Any]) -> Codec:
    """The codec that a user asked for: ``"split"`` or ``{"name": "zstd", "level": 3}``. ``ConfigError`` otherwise."""
    d: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
    name = d.get("name")
    if not isinstance(name, str) or name not in CODECS:
        near = difflib.get_close_matches(str(name), CODECS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"codec: expected one of {', '.join(sorted(CODECS))}, got {name!r}{hint}")
    try:
        return codec_from_dict(d)
    except FormatError as e:
        raise ConfigError(f"codec: {e}") from e
