"""Finds settings that may hold credentials, hides them, and passes them to the processes that need them."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hsx_dist.config.redaction import is_shown
from hsx_dist.config.secret_names import ENV_REFERENCE, HIDDEN, is_env_reference, looks_secret
from hsx_dist.config.tokens import BEFORE_TOKEN, KNOWN_TOKEN
from hsx_dist.config.urls import has_credentials, is_endpoint, is_url, public_url

# Most of these patterns search texts of stored objects, so the time of each must grow linearly with the text's length.
#: A credential in a text, by the words before it or its prefix. Prose has no long word with a digit after ``bearer``.
_SECRET_TEXT = re.compile(
    r"(?i:\b(bearer|basic)\s+(?=\S*\d)\S{16}|(accountkey|accesskey|accesssignature)=[^;\s]"
    r'|"private_key"|BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY)'
    rf"|({BEFORE_TOKEN})[^\s'\"]|{KNOWN_TOKEN}"
)
#: The beginning of a statement or an expression in a chat template.
_TEMPLATE = re.compile(r"\{[{%]")
#: A text that ``compared_form`` or an earlier version stored in place of a credential.
_COMPARED = re.compile(rf"{re.escape(HIDDEN)}( [0-9a-f]{{8}})?")
# Names of storage options (of s3fs, gcsfs, adlfs) whose values are addresses and modes, never credentials.
_HARMLESS_OPTIONS = frozenset(
    {
        "endpoint_url",
        "region",
        "region_name",
        "anon",
        "project",
        "location",
        "use_ssl",
        "requester_pays",
        "default_location",
        "addressing_style",
        "signature_version",
        "default_block_size",
        "default_cache_type",
        "max_concurrency",
        "account_name",
        "asynchronous",
        "skip_instance_cache",
        "client_kwargs",
        "config_kwargs",
        "s3",
        "version_aware",
    }
)
_ENDPOINT_OPTION = "endpoint_url"
# gcsfs accepts these words as `token`. They name the place of a credential, and are not credentials.
_WHERE_TO_LOOK = frozenset({"anon", "cloud", "google_default", "cache"})


def secret_paths(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths, at and below ``path``, that seem to hold a literal credential.

    A name that holds one is ``…`` in its path.
    """
    yield from _secret_paths(value, path, within=any(map(looks_secret, path)))


def _secret_paths(value: object, path: tuple[str, ...], *, within: bool) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping):
        for name, item, secret in _members(value, within):
            if _holds_literal(name):
                yield (*path, "…")
            else:
                yield from _secret_paths(item, (*path, name), within=secret)
        return
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in map(_as_member, value):
            yield from _secret_paths(item, path, within=within)
        return
    if value is None or isinstance(value, bool) or is_env_reference(value):
        return
    if isinstance(value, (int, float)) and "storage_options" not in path:
        return  # sampling_params.thinking_token_budget
    if _odd_endpoint(path[-1] if path else "", value):
        yield path
        return
    named_so = within and not (path[-1] == "token" and value in _WHERE_TO_LOOK)
    if named_so or (isinstance(value, str) and _holds_literal(value)):
        yield path


def _holds_literal(text: str) -> bool:
    hidden = ENV_REFERENCE.sub(HIDDEN, text)  # a word would be a token after ``Authorization: Bearer``
    named = _without_references(text)
    if has_credentials(named) or _SECRET_TEXT.search(hidden):
        return True
    # A template compares names with quoted texts. It is hidden, and not refused.
    # A reference is shown in one of the two forms.
    return _TEMPLATE.search(text) is None and not any(map(is_shown, (hidden, named)))


def _holds_secret(text: str) -> bool:
    return has_credentials(text) or _SECRET_TEXT.search(text) is not None or not is_shown(text)


def _without_references(text: str) -> str:
    """Return ``text`` with a word for each ``${env:NAME}``, and without a part before an ``@`` that is only these."""
    return ENV_REFERENCE.sub("env", re.sub(rf"(?:^|(?<=://))({ENV_REFERENCE.pattern}:?)+@", "", text))


def hide_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options for messages: names without credentials, and only values that are known to be harmless."""
    return with_shown_names((str(name), _shown_option(str(name), value)) for name, value in options.items())


def _shown_option(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return hide_options(value)
    if name not in _HARMLESS_OPTIONS or looks_secret(name) or _odd_endpoint(name, value):
        return HIDDEN
    return hide_secrets(value)


def _odd_endpoint(name: str, value: object) -> bool:
    return name == _ENDPOINT_OPTION and isinstance(value, str) and not is_endpoint(_without_references(value))


def compared_form(value: Any, *, within: bool = False) -> Any:
    """Return a copy of nested settings in which each text that looks like a credential is replaced by a hash.

    Equal values have equal copies, and other values have other copies. The hash has 32 bits, too few to compute a
    random credential from. Numbers stay, because models have settings such as ``num_key_value_heads``. The copy of a
    copy is equal to it.
    ``within``: as in ``hide_secrets``.
    """
    if isinstance(value, Mapping):
        return {compared_form(k): compared_form(v, within=secret) for k, v, secret in _members(value, within)}
    if isinstance(value, (list, tuple)):
        return [compared_form(v, within=within) for v in map(_as_member, value)]
    if isinstance(value, str) and (within or _holds_secret(value)) and not _COMPARED.fullmatch(value):
        return f"{HIDDEN} {hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return value


def hide_secrets(value: Any, *, within: bool = False) -> Any:
    """Return a copy of nested settings in which names and values that look like credentials are hidden.

    ``within``: the setting, or an enclosing one, has the name of a secret. All values in it are hidden, except
    booleans and None.
    """
    if isinstance(value, Mapping):
        return with_shown_names((k, hide_secrets(v, within=secret)) for k, v, secret in _members(value, within))
    if isinstance(value, (list, tuple)):
        return [hide_secrets(v, within=within) for v in map(_as_member, value)]
    if within and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, str):
        shown = public_url(value)  # without characters that may split a credential
        texts = {shown} if is_url(value) else {shown, value}
        return HIDDEN if _SECRET_TEXT.search(value) or any(map(_holds_secret, texts)) else shown
    return value


def with_shown_names(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of ``members`` without credentials in its names. No member is lost: equal names get numbers."""
    shown: dict[str, Any] = {}
    times: Counter[str] = Counter()  # a number is tried once, so that many equal names take linear time
    for name, value in members:
        free = public = hide_secrets(name)
        while free in shown:
            times[public] += 1
            free = f"{public} {times[public] + 1}"
        shown[free] = value
    return shown


def _members(value: Mapping[Any, Any], within: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of each member, and whether the value belongs to a secret.

    A name is searched once, not for each item of its list: both may have megabytes.
    """
    for name, item in value.items():
        yield str(name), item, within or looks_secret(str(name))


def _as_member(item: Any) -> Any:
    """Return an item of a list as a mapping if it is a secret's name and its value, as in a list of headers."""
    is_pair = isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], str)
    return {item[0]: item[1]} if is_pair and looks_secret(item[0]) else item


#: Prefixes of environment variables that hold or locate credentials. The driver passes these variables to every process
#: that opens the store.
CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "CLOUDSDK_CONFIG", "AZURE_", "STORAGE_EMULATOR_HOST", "GCSFS_", "FSSPEC_")


def credential_environment() -> dict[str, str]:
    """Return the driver's variables that a store may need. Actors get them as arguments, which Ray does not show."""
    return {k: v for k, v in os.environ.items() if k.startswith(CREDENTIAL_PREFIXES)}
