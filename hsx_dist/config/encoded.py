"""Undoes percent-encoding and wide punctuation, which hide the form of a credential.

A proxy's URL has another URL in its path: ``https://proxy/https%3A%2F%2FUSER%3APASSWORD%40HOST%2Fx``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from unicodedata import normalize
from urllib.parse import unquote, unquote_plus

# The time must grow linearly with a text's length.
#: Limit of the repetitions until a text stays the same.
ROUNDS = 5
#: Also ``+`` for the blank behind the colon or comma of JSON, as in a web form. Another ``+`` may belong to a token.
_PERCENT = re.compile(r"(?:%[0-9A-F]{2}|(?:(?<=%3A)|(?<=%2C))\+(?=%(?:22|27|5B|7B|28)))+", re.IGNORECASE)
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}|[\uff01-\uff5e\ufe10-\ufe19\ufe50-\ufe6b]")
#: Wide and small forms of ASCII characters. Libraries read some of them as ASCII.
_WIDE = {
    code: plain
    for code in (*range(0xFF01, 0xFF5F), *range(0xFE10, 0xFE1A), *range(0xFE50, 0xFE6C))
    if (plain := normalize("NFKC", chr(code))).isascii()
}
#: Characters that end a word, a link or a value → the characters in their place while a decoded text is searched as one
#: word. No text needs these: Unicode assigns no meaning to them.
_ENDS = dict(zip(" '\"<>,", "\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6", strict=True))
_JOINED = str.maketrans({**_ENDS, **{c: _ENDS[" "] for c in map(chr, range(0x3001)) if c.isspace()}})
_WIDE_JOINED = {code: plain.translate(_JOINED) for code, plain in _WIDE.items()}
_SEPARATED = str.maketrans({joined: end for end, joined in _ENDS.items()})
_TILDES = dict.fromkeys(map(ord, _ENDS.values()), "~")
#: A port of a host without a dot, and the character in place of its colon. With an ``@`` behind it, the port counts
#: as a part of a password (``breaks_the_rule``), but names of files have ``%40``: ``http://minio:9000/a%40b.jsonl``.
_PORT = re.compile(r"(://[\w-]+):(?=[0-9]*/)")
_COLON = "\ua789"
_MARKED = re.compile(rf"(://[\w-]+){_COLON}(?=[0-9]*/)")


def is_encoded(text: str) -> bool:
    return _ENCODED.search(text) is not None


def plain_form(text: str) -> str | None:
    """Return ``text`` with percent-encoding undone and wide punctuation in ASCII, or None if that takes many rounds.

    The colon of some ports is another character, which ``with_ports`` replaces.
    """
    form = with_marked_ports(text)
    for _ in range(ROUNDS):
        before, form = form, unquote(form).translate(_WIDE)
        if form == before:
            return form
    return None


def word_forms(text: str) -> Iterator[str | None]:
    """Yield ``text`` after each round of ``decoded``, with ``~`` for each replaced character.

    The last form is None if a text takes many rounds.
    """
    form = with_marked_ports(text)
    for _ in range(ROUNDS):
        before, form = form, decoded(form)
        if form == before:
            return
        yield _words(form)
    yield None


def decoded(form: str) -> str:
    """Undo one round of percent-encoding, and wide punctuation.

    A blank, comma, quote, ``<`` or ``>`` of the result ends no word: another character takes its place (``separated``).
    A password may have it, and is found as a whole only so, or while it is still encoded.
    """
    return _PERCENT.sub(lambda found: joined(unquote_plus(found[0])), form).translate(_WIDE_JOINED)


def as_one_word(text: str) -> str:
    """Return ``text`` with ``~`` in place of the characters that ``decoded`` replaces."""
    return _words(joined(text))


def _words(form: str) -> str:
    return form.translate(_TILDES)


def joined(text: str) -> str:
    return text.translate(_JOINED)


def separated(form: str) -> str:
    return form.translate(_SEPARATED)


def with_marked_ports(text: str) -> str:
    return _PORT.sub(rf"\1{_COLON}", text)


def with_ports(form: str) -> str:
    return _MARKED.sub(r"\1:", form)
