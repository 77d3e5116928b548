"""Finds URLs that may hold credentials, and URLs that libraries read in different ways. Shows URLs without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from unicodedata import normalize
from urllib.parse import unquote

from hsx_dist.config.encoded import as_one_word, is_encoded, plain_form, with_ports, word_forms
from hsx_dist.config.secret_names import HIDDEN, parameter_looks_secret
from hsx_dist.config.tokens import KNOWN_TOKEN
from hsx_dist.errors import ConfigError

# Most of these patterns search texts of stored objects, so the time of each must grow linearly with the text's length.
_REFUSED = (
    "{}: expected a URL without credentials, got one with a part that may be one. Give credentials by the environment, "
    "a profile or storage_options. Write a folder of this name as ./NAME"
)
_NO_HOST = frozenset({"file", "local", "memory", "zip", "tar", "jar", "libarchive", "reference", "dir", "data"})
#: Schemes of folders, whose names may have a ``?``.
_FOLDERS = frozenset({"file", "local"})
_BUCKETS = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "oss", "obs", "cos", "tos", "r2", "b2"})
_NAME_AND_HOST = frozenset(
    {"abfs", "abfss", "az", "adl", "wasb", "wasbs", "oci", "hf", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "root"}
)
_WITH_HOST = "|".join(sorted(_BUCKETS | _NAME_AND_HOST | {"http", "https"}))
#: A known scheme at the beginning or behind ``::``, and the characters in place of ``://``.
_GAP = re.compile(
    rf"(?:^|(?<=::))({_WITH_HOST}|{'|'.join(sorted(_NO_HOST))})( *[:;\uff1a/\\][ :;\uff1a/\\]*)", re.IGNORECASE
)
#: A word that may be a scheme, and ``://``, which makes it one. Matches other words too, to search none of them twice.
#: ``://`` behind another character has an empty scheme.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*+(://)?|(://)")
#: ``scheme://``, chained or not, also with what libraries drop between its characters.
_BEGINS = re.compile(
    r"[\0-\x20]*(?:[a-z0-9+.-]++::)*"
    r"[a-z][a-z0-9+.-]*+[\0-\x1f\x7f-\x9f]*:[\0-\x1f\x7f-\x9f]*/[\0-\x1f\x7f-\x9f]*/",
    re.IGNORECASE,
)
_CHAINED = re.compile(r"[a-z0-9+.-]+::", re.IGNORECASE)
AT = re.compile(r"@|%40|\uff20|\ufe6b")
#: What a URL is: a chain of schemes, of which one has ``://``.
_CHAIN = re.compile(r"(?:[a-z][a-z0-9+.-]*+::)*+[a-z][a-z0-9+.-]*+://", re.IGNORECASE)
_BEFORE_AT = re.compile(r"(?<=://)[^/]*@")
_PORT_AND_SLASH = re.compile(r"://[^/\s]*:[0-9]*/")
_ENDPOINT = re.compile(
    r"https?://([^/?#\s]*@)?([^/?#@:\s]+|\[[0-9A-Fa-f:.%]+\])(:(?P<port>[0-9]{1,5}))?(/[^?#]*)?", re.IGNORECASE
)
_PARAMETER = re.compile(r"([?&;#])([^=&;#?\s]+)=")
#: User and password behind ``://``. One with a character that may end a URL may also be the text behind a URL.
_USER = re.compile(r"[^/?#\\\s'\"<>()\[\]{},;`|]*@")
#: A character that ends a URL in prose. Behind a comma redaction finds an address.
_ENDS_URL = re.compile(r"[\s'\"<>,]")
#: A web server's URL without user, password and query: its scheme, its host, and its path with one slash before it.
_WEB = re.compile(r"([^:/?#]*://)(?:[^/?#]*@)?([^/?]*/*?)((?:/[^/?][^?]*)?)(?:\?|\Z)", re.DOTALL)
_ODD_AUTHORITY = re.compile(rf"(?!({'|'.join(sorted(_NO_HOST))})://)[^:]*://[^/]*[ \\\uff20\ufe6b]", re.IGNORECASE)
_BUCKET = re.compile(r"[^:@]*|arn:aws[a-z-]*:s3[a-z-]*:[a-z0-9-]*:\d{12}:(accesspoint(:[a-z0-9.-]+)?|outpost)")
#: ``github://ORG:REPOSITORY@REF``, as fsspec spells it. GitHub's tokens have known prefixes.
_REPOSITORY = re.compile(r"(?!.*(gh[a-z]_|github_pat_))[\w.-]+:[\w.-]+@[\w.-]+")
_KNOWN_TOKEN = re.compile(KNOWN_TOKEN)
#: The separator of a chain's links. An IPv6 address has it too.
_BETWEEN = re.compile(r"::(?![0-9A-Fa-f:.%]{0,60}\](?::\d{0,5})?(?:[/?#]|::|\Z))")
_HOST = re.compile(r"([^:@]*|\[[0-9A-Fa-f:.%]+\])(:(?P<port>\d{0,5}))?")


def has_credentials(text: str) -> bool:
    """Whether a URL, a chain of URLs (``a::b``) or a text with URLs in it holds what may be a credential.

    Every ``scheme://`` begins a link, which is judged alone. Its authority is the text up to the next ``/``:

    - ``file``, ``local``, ``memory``: a path; no rule.
    - ``zip``, ``tar``, ``jar``, …: a member of an archive; no rule.
    - ``s3``, ``gs``, ``gcs``, …: a bucket; no ``@``, and no ``:`` except in the ARN of an access point.
    - ``abfs``, ``hf``, ``sftp``, …: ``NAME@HOST[:PORT]``; a name without ``:`` is no credential, except a known token.
    - every other scheme: ``HOST[:PORT]``; no ``@``, and no other ``:``.

    Without an authority (``sftp:///…``), no ``@`` may follow, except where there is no rule.

    A link that breaks its rule may hold a credential, since secrets contain slashes: in ``s3://KEY:SEC/RET@bucket``
    the bucket would be ``KEY:SEC``. An ``@`` behind a valid authority belongs to a path (``s3://bucket/a@b``). A query
    or a fragment with a parameter such as ``X-Amz-Signature``, ``sig`` or ``token`` is a credential. A local path or a
    hub id has no ``://`` and holds none. A text that begins as a URL is judged as any library reads it (``check_url``).
    An address with a user and a password (``is_address``) is a credential, also as a link of a chain. So is a text of
    which the decoded form has one (``plain_form``), and a text that is encoded too often.
    """
    return _shows_one(text) or _encodes_one(text)


def _shows_one(text: str) -> bool:
    return any(map(_holds_one, dict.fromkeys(_readings(text))))


@lru_cache(maxsize=1)  # ``public_url`` and ``has_credentials`` decode the same text
def _encodes_one(text: str) -> bool:
    """Whether the decoded form of a text holds what may be a credential, or is unknown."""
    if not is_encoded(text):
        return False
    # A decoded blank may belong to a password (``word_forms``), or libraries drop it. Most texts have no such blank.
    forms = dict.fromkeys((plain_form(text), *word_forms(text)))
    return None in forms or any(_shows_one(form) for form in forms if form is not None)


def _holds_one(text: str) -> bool:
    return any(map(breaks_the_rule, links_of(text))) or is_signed_url(text) or any(map(is_address, _chained(text)))


def is_url(text: str) -> bool:
    """Whether a text is one URL or a chain of URLs, and nothing else."""
    return _CHAIN.match(text) is not None and _ENDS_URL.search(text) is None


def is_address(text: str) -> bool:
    """Whether a text is one word ``USER:PASSWORD@HOST``, as programs take a proxy or an endpoint without its scheme.

    A slash before the first colon makes it a path (``./a:b@c``). Prose has blanks.
    """
    word = text.strip().removeprefix("//")
    user, _, password = word.rpartition("@")[0].partition(":")
    is_path = "/" in user or password.startswith("//")
    return bool(password) and not is_path and len(word.split(maxsplit=1)) == 1


def _chained(text: str) -> list[str]:
    """Return the links of a chain of URLs, also those without a scheme. Any other text is one link."""
    return between_links(text) if _CHAIN.match(text) else [text]


def between_links(text: str) -> list[str]:
    """Return the texts between the ``::`` of a chain. An IPv6 address is not split."""
    return _BETWEEN.split(text)


def check_encodable(text: str) -> None:
    """Raise ConfigError for a path or URL with a character that the system's calls refuse with another error."""
    try:
        usable = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{_harmless(text)}: expected a path or URL, got one with a NUL character or half of a surrogate "
            "pair. Remove that character"
        )


def check_url(url: str) -> None:
    """Raise ConfigError for a URL that libraries read in different ways. The error shows no credentials.

    urllib drops tabs and line breaks, and obstore's parser more; obstore takes a backslash for a slash, and any number
    of slashes behind ``http:``; fsspec changes nothing. So a URL has no control characters, no whitespace but single
    spaces within its path, and neither a backslash nor a wide ``@`` before it.

    A text with ``://`` begins with a chain of schemes, and has no ``://`` without one. A known scheme with similar
    characters in place of ``://`` is a mistyped URL (``_is_mistyped``). Also raises as ``check_encodable`` does.
    """
    odd = "://" in url and (
        not url.isprintable()
        or url != url.strip(" ")
        or _CHAIN.match(url) is None
        or any(link.startswith(":") for link in links_of(url))
    )
    if odd or _as_read(url) != url or (_starts(url)[:1] == [0] and any(map(_ODD_AUTHORITY.match, links_of(url)))):
        raise ConfigError(
            f"{_harmless(url)}: expected scheme://place/path without control characters, without whitespace outside "
            "its path, and without a backslash before it, got another form. Write the URL in this form, or ./NAME for "
            "a folder of this name"
        )
    check_encodable(url)


def _harmless(url: str) -> str:
    """Return a URL of a wrong form, of which only a known scheme is shown: a credential may be anywhere behind it."""
    known = _GAP.match(_clean(url))
    return f"{known[1]}:…" if known else "…"


#: The source of an endpoint that no option and no variable names.
PROFILES_ENDPOINT = "endpoint_url of the AWS profile"


def check_endpoint(endpoint: str, source: str) -> None:
    """Raise ConfigError unless ``endpoint`` is ``http[s]://HOST[:PORT]``, with or without a path.

    Clients of S3 and GCS ignore a user and password in an endpoint, and may log them. A query may be a signature. The
    error does not show the endpoint. ``source``: name of the setting.
    """
    check_url(endpoint)
    if not is_endpoint(endpoint) or "@" in endpoint:
        raise ConfigError(
            f"{source}: expected http://HOST[:PORT] or https://HOST[:PORT], without user, password and query, got "
            "another form. Write it in this form"
        )


def is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    return found is not None and int(found["port"] or 0) <= 65535


def check_no_credentials(url: str) -> None:
    """Raise ConfigError if ``has_credentials``, if a URL has a query, and as ``check_url`` does.

    The error shows no credentials. A query may be one, under any name. And fsspec would store at another place than
    obstore, which drops the query.
    """
    check_url(url)
    if has_credentials(url):
        raise ConfigError(_REFUSED.format(public_url(url)))
    if any("?" in link for link in links_of(url) if link.partition("://")[0].lower() not in _FOLDERS):
        raise ConfigError(
            f"{public_url(url)}: expected a URL without a query, got one with a '?' behind this place. Remove the "
            "'?' and the text behind it"
        )


def check_place_of_credentials(url: str) -> None:
    """Raise ConfigError if a URL has credentials where no library reads them: in a bucket's name, as a port, in an
    address without a scheme, or percent-encoded.

    Also raises as ``check_url`` does. A web server may be a proxy that reads an encoded URL. Names of rows show it
    without credentials (``web_path``), but show other paths as they are.
    """
    check_url(url)
    scheme = next(iter(links_of(url)), "").partition("://")[0].lower()
    if any(map(is_address, _chained(url))) or (scheme not in ("http", "https") and _encodes_one(url)):
        raise ConfigError(_REFUSED.format(public_url(url)))
    for link in filter(breaks_the_rule, links_of(url)):
        if link.partition("://")[0].lower() in _BUCKETS or "@" not in _authority(link):
            raise ConfigError(_REFUSED.format(public_url(url)))


def public_url(url: str) -> str:
    """Return ``url`` without credentials and without its query, for messages, logs and stored objects.

    A link with credentials is returned as by ``public_link``, a mistyped URL with credentials as its scheme. An address
    with a user and a password becomes ``HIDDEN``. Any other text without ``://`` is returned unchanged. A text that
    encodes a credential is decoded first.
    """
    if not _encodes_one(url):
        return _public(url)
    for form in (url, plain_form(url), *word_forms(url)):
        if form is None or not _shows_one(form):
            continue
        shown = _public(url if form is url else _clean(with_ports(form)))
        if not has_credentials(shown) and not _shows_one(as_one_word(shown)):
            return shown
    known = _CHAIN.match(url)
    return f"{known[0]}{HIDDEN}" if known else HIDDEN


def _public(url: str) -> str:
    read, written = _readings(url)
    if read != written and _shows_one(url):
        # Where its credentials end is unknown.
        known = _GAP.match(written)
        return f"{known[1]}://{HIDDEN}" if known else HIDDEN
    url = _without_addresses(read)
    if "://" not in url:
        return url
    links = links_of(url)
    start = url.index(links[0]) if links else len(url)
    shown = url[:start] + "".join(public_link(link) for link in links)
    before, separator, rest = shown.partition("://")
    shown = before + separator + rest.split("?", 1)[0]
    shown = re.split("[;#]", shown, maxsplit=1)[0] if is_signed_url(shown) else shown
    return _without_addresses(shown)  # the rest of a text may be an address


def web_path(url: str) -> str:
    """Return the URL of a file on a web server without user, password and query. Rows are named by it.

    The user and password end where clients end them: at the last ``@`` before the path. An ``@`` in the path is a part
    of the name.
    """
    found = _WEB.match(url)
    if found is None or AT.search(found[2]):
        return public_url(url)
    if _encodes_one("".join(found.groups())):
        return public_url("".join(found.groups()))
    named = found[1] + found[2] + public_url(found[3])  # the path may have a URL with credentials in it
    return re.split("[;#]", named, maxsplit=1)[0] if is_signed_url(named) else named


def _without_addresses(text: str) -> str:
    return "::".join(HIDDEN if is_address(link) else link for link in _chained(text))


def is_signed_url(text: str) -> bool:
    """Whether a URL's parameters (after ``;``, ``?``, ``#``) hold a signature or a token. Such a URL grants access."""
    found = re.search(r"[;?#].*", text.partition("://")[2], re.DOTALL)
    return found is not None and any(
        parameter_looks_secret(unquote(name), separator) for separator, name in _PARAMETER.findall(found[0])
    )


def url_secrets(text: str) -> Iterator[str]:
    """Yield what may be the user and password of each link with credentials, and its parts; each also percent-decoded.

    Libraries end the password at the last ``@`` before a slash or a query. It may also have slashes in it.
    """
    decoded = (plain_form(text), *word_forms(text)) if is_encoded(text) else ()
    forms = dict.fromkeys((text, *(with_ports(form) for form in decoded if form is not None)))
    for link in filter(breaks_the_rule, (link for form in forms for link in links_of(_as_read(form)))):
        rest = link.partition("://")[2]
        authority = re.split("[/?#]", rest, maxsplit=1)[0]
        for secret in dict.fromkeys(one.rpartition("@")[0] for one in (rest, authority)):
            yield from (secret, unquote(secret), *secret.split(":", 1), *unquote(secret).split(":", 1))


def _as_read(text: str) -> str:
    """Return a text that begins as a URL without the characters that some library drops.

    Returns any other text unchanged: it may be prose.
    """
    return _readings(text)[0]


def _readings(text: str) -> tuple[str, str]:
    """Return ``_as_read(text)``, and the same with a mistyped ``://`` as it is written.

    The characters in place of ``://`` may belong to the credentials.
    """
    clean = _clean(text)
    last = max((found.start() for found in AT.finditer(clean)), default=-1)
    read = _GAP.sub(lambda found: f"{found[1]}://" if _is_mistyped(found, last) else found[0], clean)
    begins = _BEGINS.match(text) or (read != clean and (_GAP.match(clean) or _CHAINED.match(clean)))
    if not begins:
        return text, text
    # In prose that begins as a URL, only the text before an ``@`` is changed.
    return _with_quoted_user(read), _with_quoted_user(clean)


def _with_quoted_user(text: str) -> str:
    return _BEFORE_AT.sub(lambda found: _quoted(found[0]), text)


def _clean(text: str) -> str:
    return (text if text.isprintable() else "".join(filter(str.isprintable, text))).lstrip(" ")


def _is_mistyped(found: re.Match[str], last_at: int) -> bool:
    """Whether a known scheme has other characters than ``://`` behind it, and is not the beginning of a local path.

    Some programs take the text for a URL; others for a folder, whose name would show the credentials.
    """
    scheme, gap = found[1].lower(), found[2]
    slashes = "/" in gap or "\\" in gap
    if scheme in _NO_HOST:
        return slashes and gap.startswith(":") and not gap.startswith("://")
    if gap == "/" or gap.rstrip(":") == "://" or (gap == ":///" and not scheme.startswith("http")):
        return False
    return slashes or last_at >= found.end()


def _quoted(before_at: str) -> str:
    return before_at.replace(" ", "%20") if " " in before_at.partition("@")[0] else before_at


def _starts(text: str) -> list[int]:
    """Where each ``scheme://`` begins."""
    return [found.start() for found in _SCHEME.finditer(text) if found[1] or found[2]]


def links_of(text: str) -> list[str]:
    """Return the text from each ``scheme://`` to the next."""
    starts = _starts(text)
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=False)]


def _authority(link: str) -> str:
    # Settings hold texts with URLs, so blanks and punctuation may follow. Percent-encoding must not hide a credential.
    rest = unquote(re.split(r"[/\s]", link.partition("://")[2], maxsplit=1)[0])
    if not rest.isascii():
        # Some libraries read a full-width ``@`` as an ``@``. Characters are normalized one by one, because NFKC of many
        # accents in a row takes quadratic time.
        rest = "".join(normalize("NFKC", c) for c in rest)
    return rest.removesuffix("::").rstrip(",.;!?)}\"'`>*")


def breaks_the_rule(link: str) -> bool:
    """Whether one of ``links_of`` may hold a credential before its path (``has_credentials`` has the rules)."""
    scheme, authority = link.partition("://")[0].lower(), _authority(link)
    if scheme in _NO_HOST:
        return False
    # Some libraries strip slashes: the place of s3:///NAME is then NAME.
    if not authority and AT.search(link):
        return True
    if scheme in _BUCKETS:
        return _BUCKET.fullmatch(authority or _authority(link.replace(":///", "://", 1))) is None
    if scheme == "github" and _REPOSITORY.fullmatch(authority):
        return False
    name, at, host = authority.rpartition("@")
    if at and (scheme not in _NAME_AND_HOST or ":" in name or _KNOWN_TOKEN.search(name)):
        return True
    found = _HOST.fullmatch(host)
    if found is None or int(found["port"] or 0) > 65535:
        return True
    # A secret may begin with "/", or with digits and "/". It then looks like a port. Hosts with a port usually have a
    # dot.
    doubtful = found["port"] == "" or (found["port"] and re.fullmatch(r"(?!localhost$)[\w-]+", found[1]))
    behind = _PORT_AND_SLASH.search(link) if doubtful else None
    return behind is not None and "@" in link[behind.end() :]


def public_link(link: str) -> str:
    """Return one of ``links_of`` without what may be a credential.

    The user and password before the last ``@`` of a valid authority are left out. If a further ``@`` follows, or none
    precedes the path, nothing behind ``://`` is shown: a credential may have slashes in it, so it may end anywhere.
    """
    if not breaks_the_rule(link):
        return link
    scheme, _, rest = link.partition("://")
    chained = "::" if rest.endswith("::") else ""
    rest = rest.removesuffix("::")
    user = _USER.match(rest)
    # Some libraries strip slashes.
    after = rest[user.end() :].lstrip("/\\") if user else ""
    shown = f"{scheme}://{after}{chained}"
    return shown if after and not AT.search(after) and not breaks_the_rule(shown) else f"{scheme}://{HIDDEN}{chained}"
