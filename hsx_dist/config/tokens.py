"""Patterns of tokens in a text: tokens of an ``Authorization`` header, and tokens that a known prefix identifies."""

from __future__ import annotations

import re

from hsx_dist.config.secret_names import HIDDEN

# The time of each pattern must grow linearly with a text's length. No pattern matches ``HIDDEN``.

#: Prefix → the further characters that distinguish a token from a name.
_KNOWN = {
    "hf_": "[A-Za-z0-9]{20}",
    "sk-": r"[\w-]{0,60}?[A-Za-z0-9]{20}",  # names are also written so: sk-news_corpus_of_2020
    "gh[opsur]_": r"\w{20}",
    "github_pat_": r"\w{20}",
    "glpat-": r"[\w-]{20}",
    "xox[a-z]-": r"[\w-]{20}",
    r"ya29\.": r"[\w-]{20}",
    "eyJ": r"[\w.-]{20}",
    "AKIA": "[A-Z0-9]{16}",
}
_QUOTE = r"(?:[bu]?\\{0,8}['\"])?"
_HIDDEN = re.escape(HIDDEN)
#: The text before a token of any length: a header's name and its scheme, or a scheme before a known prefix.
BEFORE_TOKEN = (
    rf"(?i:authorization{_QUOTE}\s{{0,4}}[:=]\s{{0,4}}{_QUOTE}(?:bearer|basic)\s{{1,4}}(?!{_QUOTE}{_HIDDEN}){_QUOTE})"
    rf"|\b(?i:bearer|basic)\s{{1,4}}(?={'|'.join(_KNOWN)})"
)
#: Behind no letter or digit of a word. Those of an escape, such as ``%3D`` or ``\n``, are none.
_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=%[\da-fA-F]{2})|(?<=\\[nrt])|(?<=\\x[\da-fA-F]{2})|(?<=\\u[\da-fA-F]{4}))"
#: A token with a known prefix, anywhere.
KNOWN_TOKEN = rf"{_BEGINS}(?:{'|'.join(prefix + further for prefix, further in _KNOWN.items())})[\w-]*(?:\.[\w-]+)*"
