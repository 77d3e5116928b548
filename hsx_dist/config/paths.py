"""Makes relative local paths absolute, before a job runs in another working folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hsx_dist.config.models import ExtractConfig
from hsx_dist.errors import ConfigError
from hsx_dist.home import with_home

#: Endings that ``hsx_dist.inputs`` knows, with one group for each format and each compression. A test compares them.
_ENDING = re.compile(
    r"(?:\.(?:(jsonl|ndjson|json)|(txt|text)|(parquet|pq)|(arrow|feather|ipc)))?"
    r"(?:\.(?:(gz)|(zstd?)|(bz2)|(xz|lzma)))?$",
    re.IGNORECASE,
)


def resolve_paths(config: ExtractConfig, base: Path) -> ExtractConfig:
    """Return ``config`` with its relative local paths (output, input, model, tokenizer) made absolute by ``base``.

    URLs, ``builtin:`` models and Hugging Face ids stay as they are. An id counts as a folder only if ``base`` has a
    folder of that name, or if it starts like a path.
    """
    base = base.absolute()
    changes: dict[str, Any] = {
        "output": absolute_path(config.output, base),
        "model": _model(config.model, base),
    }
    if config.input.path:
        changes["input"] = config.input.model_copy(update={"path": _input_path(config.input.path, base)})
    tokenizer = config.engine_kwargs.get("tokenizer")
    if isinstance(tokenizer, str):
        changes["engine_kwargs"] = {**config.engine_kwargs, "tokenizer": _model(tokenizer, base)}
    return config.model_copy(update=changes)


def is_local(path: str) -> bool:
    """Whether ``path`` is a local path, not a URL."""
    return "://" not in path


def refuse_in_job(name: str, path: str) -> None:
    """Refuse a relative local path in a submitted job: it would be in the job's copy of the working folder, and be
    lost.

    Raises:
        ConfigError: ``path`` (of the setting or argument ``name``) is relative and local, and this is a Ray job.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and is_local(path) and not Path(path).is_absolute():
        raise ConfigError(
            f"{name}: expected an absolute path or a URL in a submitted job, got {path!r}, which would be "
            f"in the job's private copy of the folder. Give $PWD/{path}, or an object store's URL"
        )


def absolute_path(path: str, base: Path) -> str:
    """Return a relative local path made absolute by ``base``. URLs stay as they are."""
    if not is_local(path):
        return path
    return str((base / with_home(path)).resolve())


def _input_path(path: str, base: Path) -> str:
    """Return the absolute path of an input. A link keeps its own name if that names another form than its target's.

    The Hugging Face hub's cache links ``train.parquet`` to a file without an ending. In all other cases the name is the
    target's: default keys of stored rows have it.
    """
    found = absolute_path(path, base)
    if not is_local(path):
        return found
    given = base / with_home(path)
    form = _form(given.name)
    return str(given.parent.resolve() / given.name) if any(form) and form != _form(found) else found


def _form(name: str) -> list[bool]:
    """Return which format and which compression a name's ending chooses."""
    ending = _ENDING.search(name)
    assert ending is not None
    return [kind is not None for kind in ending.groups()]


def _model(model: str, base: Path) -> str:
    looks_like_path = model.startswith((".", "~", "/"))
    if looks_like_path or (is_local(model) and ":" not in model and (base / model).exists()):
        return absolute_path(model, base)
    return model
