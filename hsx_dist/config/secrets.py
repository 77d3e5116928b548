"""What may be a credential, by its name, how settings are shown without any, and how they reach other processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

#: What stands where a value is not shown.
HIDDEN = "(not shown)"

_ENV_REFERENCE = re.compile(r"\$\{env:[^}]*\}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_WORDS = frozenset(
    {
        "key",
        "apikey",
        "accesskey",
        "secretkey",
        "secret",
        "secrets",
        "token",
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "credential",
        "credentials",
        "auth",
        "authorization",
        "sas",
        "signature",
    }
)
_SECRET_PHRASES = (("connection", "string"),)
# "token" is also the model's word: token_ids, skip_special_tokens, max_tokens, token_type_ids are no secrets.
_AFTER_TOKEN = frozenset({"id", "ids", "type", "count", "limit"})
# Names of storage options (of s3fs, gcsfs, adlfs) whose values say where and how, never who.
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
# gcsfs takes these words as `token`: they say where to look for a credential, and are none themselves.
_WHERE_TO_LOOK = frozenset({"anon", "cloud", "google_default", "cache"})


def looks_secret(name: str) -> bool:
    """Whether a setting of this name usually holds a credential.

    >>> looks_secret("aws_secret_access_key"), looks_secret("HF_TOKEN"), looks_secret("token_ids")
    (True, True, False)
    """
    words = [w for w in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if w]
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word == "token" and following in _AFTER_TOKEN:
            continue
        if word in _SECRET_WORDS and not (word == "signature" and following == "version"):
            return True
        if (word, following) in _SECRET_PHRASES:
            return True
    return False


def is_env_reference(value: object) -> bool:
    """Whether ``value`` is one ``${env:NAME}`` and nothing else."""
    return isinstance(value, str) and _ENV_REFERENCE.fullmatch(value.strip()) is not None


def url_password(url: str) -> bool:
    """Whether a URL carries a password (``scheme://user:password@host``); ``abfs://container@account`` does not."""
    authority = url.partition("://")[2].partition("/")[0] if "://" in url else ""
    user, at, _ = authority.rpartition("@")
    return bool(at) and ":" in user


def public_url(url: str) -> str:
    """The URL without user, password and query (a signed URL's query is a credential); a path as it is."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    rest = rest.split("?", 1)[0]
    authority, slash, path = rest.partition("/")
    if url_password(url):
        authority = authority.rpartition("@")[2]
    return f"{scheme}://{authority}{slash}{path}"


def is_signed_url(url: str) -> bool:
    """Whether a URL's query holds a signature (S3, GCS, Azure): whoever has the URL has the access."""
    if "://" not in url:
        return False
    names = [name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
    return any(looks_secret(name) or name.lower() == "sig" for name in names)


def secret_paths(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths below (and at) ``path`` at which a literal credential seems to stand."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secret_paths(item, (*path, str(name)))
        return
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from secret_paths(item, path)
        return
    if value is None or isinstance(value, bool) or is_env_reference(value):
        return
    named_so = any(looks_secret(name) for name in path) and not (path[-1] == "token" and value in _WHERE_TO_LOOK)
    if named_so or (isinstance(value, str) and (url_password(value) or is_signed_url(value))):
        yield path


def hide_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options for showing: names stay, values only where they are known to be harmless."""
    shown: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            shown[name] = hide_options(value)
        elif str(name) not in _HARMLESS_OPTIONS or looks_secret(str(name)):
            shown[name] = HIDDEN
        else:
            shown[name] = public_url(value) if isinstance(value, str) else value
    return shown


def hide_secrets(value: Any, name: str = "") -> Any:
    """A copy of nested settings in which what looks like a credential is not shown."""
    if isinstance(value, Mapping):
        return {k: hide_secrets(v, str(k)) for k, v in value.items()}
    if value is not None and not isinstance(value, bool) and looks_secret(name):
        return HIDDEN
    if isinstance(value, (list, tuple)):
        return [hide_secrets(v, name) for v in value]
    return public_url(value) if isinstance(value, str) else value


#: Environment variables that hold or lead to credentials: taken from the driver to every process that opens the store.
CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "CLOUDSDK_CONFIG", "AZURE_", "STORAGE_EMULATOR_HOST", "GCSFS_", "FSSPEC_")


def credential_environment() -> dict[str, str]:
    """The driver's variables that a store may need. They travel as actor arguments, which Ray shows nowhere."""
    return {k: v for k, v in os.environ.items() if k.startswith(CREDENTIAL_PREFIXES)}
