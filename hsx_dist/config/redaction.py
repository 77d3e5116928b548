"""Redaction of free text: messages and tracebacks of libraries, which may contain URLs, headers and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from hsx_dist.config.encoded import (
    ROUNDS,
    decoded,
    is_encoded,
    joined,
    plain_form,
    separated,
    with_marked_ports,
    with_ports,
)
from hsx_dist.config.secret_names import HIDDEN, is_env_reference, looks_secret, parameter_looks_secret
from hsx_dist.config.tokens import BEFORE_TOKEN, KNOWN_TOKEN
from hsx_dist.config.urls import AT, between_links, breaks_the_rule, links_of, public_link

#: Limit in characters of a redacted text. The middle of a longer text is left out.
MOST = 1 << 16
_CUT = " … "
#: How many times as much of a text's end is searched for the name in front of a list that is longer than ``MOST``.
_FAR = 16
#: Limit of the repetitions until a text stays the same. Nothing of a text that needs more is shown.
_ROUNDS = 8

# The time of each pattern must grow linearly with the text's length. No pattern matches ``HIDDEN``, so that a redacted
# text stays the same.
#: One character in place of ``HIDDEN`` while links are searched, because a link ends at a blank. No text needs it:
#: Unicode assigns no meaning to it.
_MASK = "\ufdd0"
_HIDDEN = re.escape(HIDDEN)
_WORD = re.compile(r"\S+")
#: A word before the name ``key``.
_BEFORE_KEY = re.compile(r"([\w.-]{1,40}) \Z")
#: A host, and the text to the first quote, bracket or control character. A bracket may surround an IPv6 address.
_BARE = re.compile(r"(\[[0-9A-Fa-f:.%]*\])?[^'\"<>()\[\]{},;`|\0-\x1f]*")
#: ``USER:PASSWORD@HOST`` may be in one word with a link, behind a comma.
_ADDRESS = re.compile(r"[^\s,'\"]+")
#: The separator, the name and the ``=`` of a parameter. JSON and ``repr`` of some languages have codes of characters.
_PARAMETER = re.compile(r"(?:([?&;#])|\\(?:u00|x)(26|3f|3b|23))([^=&;#?\s\\]++)(?:=|\\++(?:u00|x)3d)", re.IGNORECASE)
_PARAMETER_ENDS = re.compile(r"[&\s'\"<>]|\\u0026|(?<!\\)\\++['\"]|\Z")
#: The quotes of JSON within JSON have backslashes.
_QUOTE = r"(\\*(?:'''|\"\"\"|['\"]))"
#: Text of a list or of an object that is in no quotes, such as ``None, 1, [``. JSON within JSON may have ``\n`` in it.
_UNQUOTED = r"(?:[^'\"\\\])}]|\\++\w){0,200}+"
#: A name and a quoted value, or a list of them: ``'name': 'value'``, ``"name": [null, "value"]``, ``name='value'``,
#: ``('name', 'value')``.
_SETTING = re.compile(
    r"(?<![\w.-])([\w.-]++)(?:(?:\\*['\"])?\s{0,40}[:=]|\\*['\"]\s{0,40}(,))\s{0,40}"
    rf"([\[({{]{_UNQUOTED})?(?i:[bfru]{{0,2}}){_QUOTE}"
)
#: The next quoted text of a list or of an object, also the name of its next member.
_NEXT_VALUE = re.compile(_UNQUOTED + _QUOTE)
#: What precedes the text of a quoted value, and the words before a token.
_OPENING = re.compile(rf"[\[({{]{{0,9}}(?i:[bfru]{{0,2}}){_QUOTE}")
_SCHEME = re.compile(r"(?:bearer|basic)\s{1,4}", re.IGNORECASE)
_NAME = re.compile(r"[\w.-]+")
_IS_NAME = re.compile(r"\\*['\"]\s{0,40}[:=]")
_ELEMENT = re.compile(rf"<([\w.:-]++)(\s[^<>]*+)?>(?!{_HIDDEN})(?:\s{{0,40}}<!\[CDATA\[)?[^<]+")
_TOKEN = re.compile(
    rf"({BEFORE_TOKEN})[^\s'\"]+|((?i:\b(?:bearer|basic)\s{{1,4}}))(?=[^\s'\"]*\d)[^\s'\"]{{16,}}|{KNOWN_TOKEN}"
)
#: A member of a connection string.
_KEY = re.compile(
    rf"(accountkey|accesskey|accesssignature|\b(?:password|passwd|pwd))=(?!{_HIDDEN}|\\+['\"])[^;\s'\"]+",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(
    rf"(BEGIN [A-Z0-9 ]{{0,20}}PRIVATE KEY)(?! {_HIDDEN}).*?(END [A-Z0-9 ]{{0,20}}PRIVATE KEY|\Z)", re.DOTALL
)
#: Words that are left out on both sides of a cut. So the text has room if a half of ``HIDDEN`` is replaced again.
_WORDS_AT_CUT = 10


def redact_text(text: str) -> str:
    """Return ``text`` without what may be a credential. Takes time linear in its length, and shortens a long text.

    A redacted text stays the same.

    Hides the user and password of a URL, and of an address ``USER:PASSWORD@HOST``. Hides the value of a parameter, a
    quoted setting or an XML element whose name is a secret's (``looks_secret``). Hides private keys, and the tokens of
    ``hsx_dist.config.tokens``.

    >>> redact_text("GET https://me:pw@host/x?X-Amz-Signature=abc&n=1 failed")
    'GET https://host/x?X-Amz-Signature=(not shown)&n=1 failed'
    """
    if len(text) > MOST:
        # The ends are redacted with as much of the middle: a value's name, or the beginning of a key, may be there.
        # Nothing next to the other end of this middle is shown: it may be half a credential.
        half = MOST // 2
        end = _without(far := text[-_FAR * MOST :], _settings(far))
        if len(end) <= MOST and len(far) == len(text):
            text = end
        else:
            text = _ends(_hidden(text[:MOST])[:-half], _hidden(end[-MOST:])[half:])
    for _ in range(_ROUNDS):
        shown = _hidden(text)
        if len(shown) > MOST:
            shown = _ends(shown, shown)
        if shown == text:
            return shown
        text = shown  # a hidden value may reveal an address or a parameter around it
    return HIDDEN


def is_shown(text: str) -> bool:
    """Whether redaction hides nothing of ``text``, the text of a setting. An ``@`` in a path is accepted here."""
    if AT.search(text):
        text = _ADDRESS.sub(lambda found: AT.sub("/", found[0]) if _is_path(found[0]) else found[0], text)
    half = MOST // 2
    pieces = (text[at : at + MOST] for at in range(0, max(len(text) - half, 1), half))
    return all(_hidden(piece) == piece for piece in pieces)


def _is_path(word: str) -> bool:
    form = plain_form(word) if is_encoded(word) else word
    return form is not None and "/" in form.partition(":")[0].removeprefix("//")


def _ends(head: str, tail: str) -> str:
    """Return the beginning of ``head`` and the end of ``tail``, together at most ``MOST`` characters."""
    half = (MOST - len(_CUT)) // 2
    words = head[:half].split(" ")[:-_WORDS_AT_CUT], tail[-half:].split(" ")[_WORDS_AT_CUT:]
    return _CUT.join(map(" ".join, words))


def _hidden(text: str) -> str:
    text = _masked(text)
    if is_encoded(text):
        text = _WORD.sub(lambda found: _encoded(found[0]), text.replace(HIDDEN, _MASK))
    return text.replace(_MASK, HIDDEN)


def _masked(text: str) -> str:
    """Return ``text`` with ``_MASK`` or ``HIDDEN`` in place of credentials that are not encoded."""
    # The values of names are replaced before links are searched: the ``@`` of a password in the same word would end the
    # user of a link. Most texts lack the characters that the slower patterns need.
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(rf"\1 {_MASK}", text)
    # Quoted values are replaced before parameters: the end of a parameter may be the quote in front of a value.
    if "'" in text or '"' in text:
        text = _without(text, _settings(text))
    if "=" in text or "\\" in text:
        text = _without(text, _parameters(text))
    if "<" in text:
        text = _ELEMENT.sub(
            lambda found: f"<{found[1]}{found[2] or ''}>{_MASK}" if looks_secret(found[1]) else found[0], text
        )
    text = _TOKEN.sub(rf"\1\2{_MASK}", text)
    if "=" in text:
        text = _KEY.sub(rf"\1={_MASK}", text)
    if "://" in text:
        text = _WORD.sub(lambda found: _links(found[0]), text)
    if "@" in text:
        text = _ADDRESS.sub(lambda found: _address(found[0]), text)
    return text


def _without(text: str, values: Iterable[tuple[int, int]]) -> str:
    """Return ``text`` with ``_MASK`` in place of ``values``: beginnings and ends, in order."""
    pieces, at = [], 0
    for start, end in values:
        pieces += [text[at:start], _MASK]
        at = end
    return "".join(pieces) + text[at:]


def _parameters(text: str) -> Iterator[tuple[int, int]]:
    """The values of secret parameters. A harmless parameter's value may have further parameters in it."""
    at = 0
    while found := _PARAMETER.search(text, at):
        at = found.end()
        separator = found[1] or chr(int(found[2], 16))
        if parameter_looks_secret(unquote(found[3]), separator) and not text.startswith(HIDDEN, at):
            opening, scheme = _OPENING.match(text, at), _SCHEME.match(text, at)
            if opening and opening.end() > at + 1:
                start = opening.end()
                at = _closing(text, opening[1], start)
            else:
                end = _PARAMETER_ENDS.search(text, scheme.end() if scheme else at)
                start, at = at, end.start() if end is not None else len(text)
            if at > start and text[start:at] not in (_MASK, HIDDEN):
                yield start, at
        else:
            at -= 1  # ``=`` may be followed by ``?name=``


def _settings(text: str) -> Iterator[tuple[int, int]]:
    """The values of secret settings."""
    at = 0
    while found := _SETTING.search(text, at):
        before = _BEFORE_KEY.search(text, max(at, found.start() - 41), found.start()) if found[2] else None
        if not names_a_secret(found[1], in_list=bool(found[2]), before=before[1] if before else ""):
            at = found.end(1)  # the quoted value may be the name of the next setting
            continue
        quote, at = found[4], found.end()
        while True:
            end = _closing(text, quote, at)
            if found[2] and not found[3] and _IS_NAME.match(text, end):
                at = min(at, end)  # the next setting, and no pair of a name and a value
                break
            if end > at and not text.startswith(HIDDEN, at) and not is_env_reference(text[at:end]):
                yield at, end
            if not found[3] and _NAME.fullmatch(text, at, end):
                # It may also be the name of the next setting: ``unknown key: 'password': 'value'``. Both are hidden,
                # because a message about a credential looks the same: ``invalid key: 'value': 'reason'``.
                break
            at = min(end + len(quote), len(text))
            following = _NEXT_VALUE.match(text, at) if found[3] else None
            if following is None:
                break
            quote, at = following[1], following.end()


def names_a_secret(name: str, *, in_list: bool, before: str = "") -> bool:
    """Whether a quoted value behind ``name`` may be a secret. ``KeyError: 'x'`` and ``['key', 'text']`` have none.

    ``before``: the word before the name. ``('api key', 'x')`` has a secret, ``('primary key', 'x')`` has none.
    """
    if in_list and name == "key":
        return looks_secret(f"{before}keys")
    return looks_secret(name) and not name.endswith("Error")


def _closing(text: str, quote: str, at: int) -> int:
    """Where the quote that closes a value begins: it has as many backslashes as the opening one."""
    while (end := text.find(quote, at)) >= 0:
        if text[end - 1] != "\\" or end == at:
            return end
        at = end + len(quote)
    return len(text)


def _encoded(word: str) -> str:
    """Return a word as it is if its decoded form has no credential. Otherwise return the redacted form."""
    if not is_encoded(word):
        return word
    form, hides = with_marked_ports(word), False
    for _ in range(ROUNDS):
        before, form = form, decoded(form)
        if form == before:
            break
        # First as one word, then with its quotes and blanks: a quoted value is found only with them.
        word_shown = _masked(form).replace(HIDDEN, _MASK)
        text = separated(word_shown)
        shown = text if text == form else _masked(text).replace(HIDDEN, _MASK)
        hides = hides or word_shown != form or shown != text
        form = word_shown if shown == text else joined(shown)
    else:
        return _MASK
    # A decoded line break could begin a false line of a log.
    text = with_ports(separated(form))
    return "".join(c if c.isprintable() or c == _MASK else " " for c in text) if hides else word


def _links(word: str) -> str:
    if "://" in word and (found := links_of(word)):
        return word[: word.index(found[0])] + "".join(map(_link, found))
    return word


def _address(word: str) -> str:
    if found := links_of(word):  # ``_links`` has shown them, but a chain may end in an address
        start = word.index(found[0])
        first, *others = between_links(word[start:])
        return "::".join([_address(word[:start]) + first, *map(_address, others)])
    before, at, host = word.rpartition("@")
    user, colon, password = before.partition(":")
    # gRPC names an endpoint without its scheme.
    return f"{user}:{HIDDEN}@{host}" if at and colon and password else word


def _link(link: str) -> str:
    # In prose a quote or a bracket ends a link, and a colon may follow it. A password may contain them.
    bare = _BARE.match(link, link.rfind("@") + 1 or link.index("://") + 3)
    shown = (link[: bare.end()] if bare else link).rstrip(":.")
    return (public_link(shown) if breaks_the_rule(shown) else shown) + link[len(shown) :]
