"""The settings and files that determine a run's samples. A run resumes only if they are unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.config.engine_arguments import engine_meaning
from hsx_dist.jobs.capture import capture_of_run
from hsx_dist.jobs.preflight import Model

_COMMIT = re.compile("[0-9a-f]{40}")


def run_meaning(config: ExtractConfig, model: Model) -> dict[str, Any]:
    """Return the member ``meaning`` of ``run.json``. ``config``: with the model's commit as ``revision``."""
    capture = capture_of_run(config, model.rows)
    return {
        **config.meaning(),
        "layers": list(model.layers),
        **({} if capture is None else {"source": "taps", "capture": capture}),
        **({} if model.weights is None else {"weights": model.weights}),
        "tokenizer_sha256": model.tokenizer_sha256,
        "chat_template_sha256": model.chat_template_sha256,
    }


def differences(
    info: Mapping[str, Any], meaning: Mapping[str, Any], revision: str | None
) -> list[tuple[str, Any, Any]]:
    """Return the settings in which a stored run differs: name (``input.text``), stored and present value.

    Args:
        info: the stored ``run.json``.
        meaning: ``run_meaning`` of the present configuration.
        revision: as the user wrote it.
    """
    before, now = dict(info.get("meaning") or {}), dict(meaning)
    # Earlier versions recorded the revision as written, no weights, and fewer engine arguments.
    if not _COMMIT.fullmatch(str(before.get("revision"))):
        now["revision"] = revision
    if "weights" not in before:
        now.pop("weights", None)
    used = {**_engine_kwargs(info.get("settings")), **_engine_kwargs(before)}
    if used:
        before["engine_kwargs"] = engine_meaning(used)
    return _differences(before, now)


def _engine_kwargs(settings: Any) -> Mapping[str, Any]:
    found = settings.get("engine_kwargs") if isinstance(settings, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*before, *now}):
        had, has = before.get(name), now.get(name)
        if isinstance(had, Mapping) and isinstance(has, Mapping):
            found += _differences(had, has, f"{within}{name}.")
        elif had != has:
            found.append((f"{within}{name}", had, has))
    return found
