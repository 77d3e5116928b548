"""How obstore reaches a bucket as fsspec would, and what it cannot be given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hsx_dist.errors import ConfigError

#: Options that mean nothing to whole objects: how fsspec reads files, caches and names.
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
#: How long obstore keeps what a provider gave: asking botocore again is cheap, and it knows when to refresh.
KEEP = timedelta(seconds=60)


class NotTranslated(Exception):
    """An option, or a place for credentials, that obstore cannot be given as fsspec understands it."""


@dataclass(frozen=True)
class Connection:
    """How obstore reaches a bucket, as fsspec would with the same options and environment.

    ``make(client_options, retry_config)`` gives obstore's own store for the whole bucket. ``renewable``: credentials
    that ran out may be there anew when they are looked up again. ``region()``: where the service says the bucket lies.
    ``secrets``: what was handed out of credentials that were found elsewhere than in options, and no text may show.
    """

    make: Callable[[dict[str, Any], dict[str, Any]], Any]
    renewable: bool
    client_options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None
    max_retries: int = 2
    sorts: bool = False
    region: Callable[[], str | None] = lambda: None
    secrets: Collection[str] = ()


def only(options: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise ``NotTranslated`` unless all ``options`` that are set are ``known``, or of no matter to whole objects."""
    for name, value in options.items():
        if name not in known and name not in _FILES_ONLY and value is not None:
            raise NotTranslated(f"{where}.{name} has no counterpart in obstore")


def mapping(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The option ``name``, whose value is a mapping; empty without it. ``ConfigError`` when it is something else."""
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options do not fit: {name}: expected a mapping, got {type(value).__name__}")
    return value
