"""Relative local paths made absolute, before a job is carried to another working folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsx_dist.config.models import ExtractConfig


def resolve_paths(config: ExtractConfig, base: Path) -> ExtractConfig:
    """``config`` with its relative local paths (output, input, model, tokenizer) made absolute against ``base``.

    URLs, ``builtin:`` models and Hugging Face ids stay as they are; an id is taken for a folder only where
    ``base`` has such a folder, or when it begins like a path.
    """
    base = base.absolute()
    changes: dict[str, Any] = {
        "output": _absolute(config.output, base),
        "model": _model(config.model, base),
    }
    if config.input.path:
        changes["input"] = config.input.model_copy(update={"path": _absolute(config.input.path, base)})
    tokenizer = config.engine_kwargs.get("tokenizer")
    if isinstance(tokenizer, str):
        changes["engine_kwargs"] = {**config.engine_kwargs, "tokenizer": _model(tokenizer, base)}
    return config.model_copy(update=changes)


def is_local(path: str) -> bool:
    """Whether ``path`` is a local path, not a URL."""
    return "://" not in path


def _absolute(path: str, base: Path) -> str:
    if not is_local(path):
        return path
    return str((base / Path(path).expanduser()).resolve())


def _model(model: str, base: Path) -> str:
    looks_like_path = model.startswith((".", "~", "/"))
    if looks_like_path or (is_local(model) and ":" not in model and (base / model).exists()):
        return _absolute(model, base)
    return model
