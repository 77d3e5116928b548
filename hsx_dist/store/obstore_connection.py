"""obstore's settings for a bucket that match fsspec's, and the error for options without a counterpart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hsx_dist.config.secrets import hide_secrets
from hsx_dist.errors import ConfigError

#: Options that do not concern whole objects: fsspec's file reads, caches and names.
_FILES_ONLY = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "consistency",
        "cache_timeout",
        "check_connection",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "default_location",
        "fixed_upload_size",
        "listings_expiry_time",
        "local_expiry_check",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
#: How long obstore keeps a provider's credentials. Asking botocore again is cheap, and it refreshes them when needed.
KEEP = timedelta(seconds=60)


class NotTranslated(Exception):
    """obstore has no counterpart of an fsspec option or of a source of credentials."""


@dataclass(frozen=True)
class Connection:
    """obstore's settings for a bucket, equivalent to fsspec's with the same options and environment.

    ``make(client_options, retry_config)`` returns obstore's store for the whole bucket. ``renewable``: looking up
    expired credentials again may find new ones. ``region()``: the bucket's region according to the service, or None.
    ``secrets``: credentials from other sources than the options, to be redacted from texts.
    """

    make: Callable[[dict[str, Any], dict[str, Any]], Any]
    renewable: bool
    client_options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None
    max_retries: int = 2
    region: Callable[[], str | None] = lambda: None
    secrets: Collection[str] = ()


def only(options: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise ``NotTranslated`` unless all set ``options`` are ``known`` or do not concern whole objects."""
    for name, value in options.items():
        if name not in known and name not in _FILES_ONLY and value is not None:
            raise NotTranslated(f"{where}.{hide_secrets(name)} has no counterpart in obstore")


def mapping(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping ``options[name]``, empty by default. Raises ``ConfigError`` if it is no mapping."""
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options.{name}: expected a mapping, got {type(value).__name__}. Correct it")
    return value
