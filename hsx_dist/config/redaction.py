"""Redaction of free text: messages and tracebacks of libraries, which may contain URLs, headers and answers."""

from __future__ import annotations

import re
from urllib.parse import unquote

from hsx_dist.config.secrets import HIDDEN, breaks_the_rule, links_of, looks_secret, public_link

#: Limit in characters of a redacted text. The middle of a longer text is left out.
MOST = 1 << 16

# The time of each pattern must grow linearly with the text's length. No pattern matches ``HIDDEN``, so that a redacted
# text stays the same.
_WORD = re.compile(r"\S+")
#: ``scheme://`` and the text to the first quote, bracket or control character. A bracket may surround an IPv6 address.
_BARE = re.compile(r"[^:]*://(\[[0-9A-Fa-f:.%]*\])?[^'\"<>()\[\]{},;`|\0-\x1f]*")
_PARAMETER = re.compile(r"([?&;#])([^=&;#?\s]+)=(?!\(not)[^&\s'\"<>]+")
#: ``'name': 'value'``, as in settings and headers, and ``<name>value<`` of XML.
_QUOTED = re.compile(r"(['\"])([\w.-]{1,100})\1(\s?[:,=]\s?[bu]?)(['\"])(?!\(not)[^'\"]+")
_ELEMENT = re.compile(r"<([\w.-]{1,100})>(?!\(not)[^<]+")
_TOKEN = re.compile(r"\b(bearer|basic)\s{1,4}(?=[^\s'\"]*\d)[^\s'\"]{16,}", re.IGNORECASE)
_KEY = re.compile(r"\b(accountkey|accesskey|accesssignature)=(?!\(not)[^;\s'\"]+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"(BEGIN [A-Z ]{0,20}PRIVATE KEY)(?! \(not).*?(END [A-Z ]{0,20}PRIVATE KEY|\Z)", re.DOTALL)


def redact_text(text: str) -> str:
    """Return ``text`` without what may be a credential. Takes time linear in its length, and shortens a long text.

    Hides the user and password of a URL, and of an address ``USER:PASSWORD@HOST``. Hides the value of a parameter, a
    quoted setting or an XML element whose name is a secret's (``looks_secret``). Hides bearer tokens and private keys.

    >>> redact_text("GET https://me:pw@host/x?X-Amz-Signature=abc&n=1 failed")
    'GET https://host/x?X-Amz-Signature=(not shown)&n=1 failed'
    """
    if len(text) > MOST:
        # Without the words at the cut: half a credential would not be recognised.
        head, _, _ = text[: MOST // 2].rpartition(" ")
        _, _, tail = text[-MOST // 2 :].partition(" ")
        text = f"{head} … {tail}"
    text = _PRIVATE_KEY.sub(rf"\1 {HIDDEN}", text)
    text = _WORD.sub(lambda found: _word(found[0]), text)
    text = _PARAMETER.sub(lambda found: _named(found, found[2], f"{found[1]}{found[2]}={HIDDEN}"), text)
    text = _QUOTED.sub(
        lambda found: _named(found, found[2], f"{found[1]}{found[2]}{found[1]}{found[3]}{found[4]}{HIDDEN}"), text
    )
    text = _ELEMENT.sub(lambda found: _named(found, found[1], f"<{found[1]}>{HIDDEN}"), text)
    return _KEY.sub(rf"\1={HIDDEN}", _TOKEN.sub(rf"\1 {HIDDEN}", text))


def _named(found: re.Match[str], name: str, hidden: str) -> str:
    return hidden if looks_secret(unquote(name)) else found[0]


def _word(word: str) -> str:
    if "://" in word and (found := links_of(word)):
        return word[: word.index(found[0])] + "".join(map(_link, found))
    before, at, host = word.rpartition("@")
    user, colon, password = before.partition(":")
    # gRPC names an endpoint without its scheme.
    return f"{user}:{HIDDEN}@{host}" if at and colon and password else word


def _link(link: str) -> str:
    # In prose a quote or a bracket ends a link, and a colon may follow it. A password may contain them.
    bare = _BARE.match(link) if "@" not in link else None
    shown = (bare[0] if bare else link).rstrip(":.")
    return (public_link(shown) if breaks_the_rule(shown) else shown) + link[len(shown) :]
