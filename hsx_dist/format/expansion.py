"""How much larger than its stored bytes decoded states may be."""

from __future__ import annotations

import os
import re

from hsx_dist.errors import ConfigError, FormatError

VARIABLE = "HSX_MAX_EXPANSION"
#: Decoded bytes for one stored byte, unless the variable says another number.
_DEFAULT = 64
#: So much is decoded from however few bytes.
_FREE_BYTES = 64 << 20


def check_expansion(raw_bytes: int, stored_bytes: int) -> None:
    """Refuse to allocate ``raw_bytes`` for what ``stored_bytes`` encode.

    Codecs halve states, or take a fifth; a zstd frame can hold 32,768 times its length, where all values are equal.

    Raises:
        FormatError: it is more than ``HSX_MAX_EXPANSION`` (default: 64) times as much, and more than 64 MiB.
        ConfigError: that variable is no number.
    """
    if raw_bytes <= _FREE_BYTES:
        return
    text = os.environ.get(VARIABLE) or str(_DEFAULT)
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigError(f"{VARIABLE}: expected a whole number from 1 to 999999, got {text!r}. Correct it")
    if raw_bytes > _FREE_BYTES + int(text) * stored_bytes:
        raise FormatError(
            f"expected states of at most {text} times the {stored_bytes} bytes that encode them, got a claim of "
            f"{raw_bytes} bytes. If you trust the object, set {VARIABLE} to a larger number"
        )
