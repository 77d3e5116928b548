"""Typed settings of an extraction: their definitions, how they are read, and how they are shown without credentials."""

from __future__ import annotations

from hsx_dist.config.checks import CODEC_NAMES
from hsx_dist.config.loading import load_config, parse_storage_options
from hsx_dist.config.models import (
    ExtractConfig,
    InputConfig,
    ReplicaConfig,
    Settings,
    StoreConfig,
    WritersConfig,
)
from hsx_dist.config.paths import absolute_path, is_local, refuse_in_job, resolve_paths
from hsx_dist.config.secret_names import HIDDEN, looks_secret
from hsx_dist.config.urls import public_url

__all__ = [
    "CODEC_NAMES",
    "HIDDEN",
    "ExtractConfig",
    "InputConfig",
    "ReplicaConfig",
    "Settings",
    "StoreConfig",
    "WritersConfig",
    "absolute_path",
    "is_local",
    "load_config",
    "looks_secret",
    "parse_storage_options",
    "public_url",
    "refuse_in_job",
    "resolve_paths",
]
