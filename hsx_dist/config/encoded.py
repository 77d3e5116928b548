"""Undoes percent-encoding and wide punctuation, which hide the form of a credential.

A proxy's URL has another URL in its path: ``https://proxy/https%3A%2F%2FUSER%3APASSWORD%40HOST%2Fx``.
"""

from __future__ import annotations

import re
from unicodedata import normalize
from urllib.parse import unquote

# The time must grow linearly with a text's length.
#: Limit of the repetitions until a text stays the same.
_ROUNDS = 5
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}|[\uff01-\uff5e\ufe10-\ufe19\ufe50-\ufe6b]")
#: Wide and small forms of ASCII characters. Libraries read some of them as ASCII.
_WIDE = {
    code: plain
    for code in (*range(0xFF01, 0xFF5F), *range(0xFE10, 0xFE1A), *range(0xFE50, 0xFE6C))
    if (plain := normalize("NFKC", chr(code))).isascii()
}
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
    form = _PORT.sub(rf"\1{_COLON}", text)
    for _ in range(_ROUNDS):
        before, form = form, unquote(form).translate(_WIDE)
        if form == before:
            return form
    return None


def with_ports(form: str) -> str:
    return _MARKED.sub(r"\1:", form)
