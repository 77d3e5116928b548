"""fsspec's options for each link of a URL, with those of fsspec's configuration, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hsx_dist.config.checks import texts_for_false
from hsx_dist.config.paths import is_local
from hsx_dist.config.urls import check_endpoint
from hsx_dist.errors import ConfigError

#: Options that are a credential's text. YAML reads unquoted digits as a number. ``token`` may also be a mapping.
_CREDENTIALS = frozenset(
    {
        "key",
        "secret",
        "token",
        "username",
        "password",
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "account_key",
        "sas_token",
        "client_secret",
    }
)
_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_AZURE = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_SECRET")
#: Scheme → environment variables that are a credential's text.
_VARIABLES = {"s3": _AWS, "s3a": _AWS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
#: Options that name the file that a link reads, in place of the URL. ``bounding_answers`` does not see them.
_NAMES = frozenset({"fo", "fs", "protocol", "target_options", "target_protocol"})
#: Options with which a cache may give files of different folders one copy.
_NAMES_OF_COPIES = frozenset({"cache_mapper", "same_names"})
_EMULATOR = "STORAGE_EMULATOR_HOST"
#: Schemes of local files.
LOCAL = ("file", "local")


def checked_options(url: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return fsspec's options for ``url`` with those of fsspec's configuration, such as ``FSSPEC_S3_KEY``.

    fsspec itself adds its configuration last: checks would not see it, and ``bounding_answers`` would replace it.
    In the result the options of the first link of a chain are at the top. Those of others are in mappings by scheme.

    Raises:
        ConfigError: a credential is no text, a flag is a text, or an option names a file in place of the URL, or the
            copies of a cache. Or a credential has a control character, or an endpoint a user or a password, also in the
            environment. The message has no value.
    """
    result = dict(_mapping("storage_options", options))
    first, *others = ["file"] if is_local(url) else [link.partition("://")[0] for link in url.split("::")]
    # fsspec also takes the options of the first link from a mapping of its name.
    result = _configured(first, {**_mapping(f"storage_options.{first}", result.pop(first, None)), **result})
    _check("storage_options", result)
    from_variables = [] if _has_credentials(result) else [first]
    for scheme in others:
        found = _configured(scheme, _mapping(f"storage_options.{scheme}", result.get(scheme)))
        _check(f"storage_options.{scheme}", found)
        if found:
            result[scheme] = found
        if not _has_credentials(found):
            from_variables.append(scheme)
    _check_environment(from_variables)
    return result


def _configured(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with those of fsspec's configuration for the scheme. An option counts more."""
    if scheme in LOCAL:
        return dict(options)
    # Imported here: reading from a folder needs no fsspec.
    from fsspec import get_filesystem_class
    from fsspec.config import apply_config, conf

    try:
        return dict(apply_config(get_filesystem_class(scheme), dict(options)) if conf else options)
    except (ImportError, ValueError):  # a path, or an error that is raised again when the URL is opened
        return dict(options)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {type(value).__name__}. Give names and values")
    return value or {}


def _check(name: str, options: Mapping[str, Any]) -> None:
    """Check a link's options: credentials are texts, flags are none, and endpoints have no credential."""
    if named := sorted(_NAMES & options.keys()):
        raise ConfigError(
            f"{name}.{named[0]}: expected it to be absent, got a value: only the URL names the file. Name it "
            "there, such as zip://NAME::URL"
        )
    if named := sorted(option for option in _NAMES_OF_COPIES & options.keys() if options[option] not in (None, False)):
        raise ConfigError(
            f"{name}.{named[0]}: expected it to be absent, got a value: files of one name in different folders would "
            "share a copy, and one would have the rows of another. Remove it"
        )
    client = _mapping(f"{name}.client_kwargs", options.get("client_kwargs"))
    for within, mapping in {name: options, f"{name}.client_kwargs": client}.items():
        for setting in _CREDENTIALS & mapping.keys():
            value = mapping[setting]
            if isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool):
                kind = "a list" if isinstance(value, (list, tuple)) else "a number"
                raise ConfigError(f"{within}.{setting}: expected text, got {kind}. Put it in quotes")
            _check_text(f"{within}.{setting}", value)
        if wrong := texts_for_false(within, mapping):
            raise ConfigError("\n".join(wrong))
        if mapping.get("endpoint_url"):
            check_endpoint(str(mapping["endpoint_url"]), f"{name}.endpoint_url")


def _has_credentials(options: Mapping[str, Any]) -> bool:
    """Whether the options name credentials, or say where they are. Then the variables of credentials do not count."""
    return bool((_CREDENTIALS | {"anon", "profile"}) & {*options, *(options.get("client_kwargs") or {})})


def _check_text(name: str, value: object) -> None:
    """Raise ConfigError for a credential with a control character. obstore panics if a header has one."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise ConfigError(
            f"{name}: expected a credential without control characters, got a control character, such as a line break "
            "at the end. Remove it"
        )


def _check_environment(schemes: Sequence[str]) -> None:
    for name in (name for scheme in schemes for name in _VARIABLES.get(scheme, ())):
        _check_text(name, os.environ.get(name))
    # Names, not a prefix: AWS_ENDPOINT_DISCOVERY_ENABLED is no endpoint, and endpoints of other services are not used.
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS"):
        if value := os.environ.get(name):
            check_endpoint(value, name)
    # gcsfs also takes a host without a scheme, and logs it.
    if "@" in os.environ.get(_EMULATOR, ""):
        raise ConfigError(f"{_EMULATOR}: expected a host or http://HOST[:PORT], got user or password too. Correct it")
