"""The settings and files that determine a run's samples. A run resumes only if they are unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hsx_dist.config import ExtractConfig, public_url
from hsx_dist.config.engine_arguments import CHOOSE_POINTS, engine_meaning
from hsx_dist.config.secret_names import HIDDEN
from hsx_dist.config.secrets import compared_form
from hsx_dist.errors import ConfigError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.jobs.capture import capture_of_run
from hsx_dist.jobs.preflight import Model, argument_folders

_NOT_SET = "(not set)"
#: Mappings whose members are settings of ours: null is the same as absent. Elsewhere null is a value: vLLM generates to
#: the end with ``max_tokens: null``, and one token without it.
_SETTINGS = ("", "input", "capture")
#: Members that earlier versions did not record.
_NEW = ("weights", "folders")


def run_meaning(config: ExtractConfig, model: Model) -> dict[str, Any]:
    """Return the member ``meaning`` of ``run.json``. ``config``: with the model's commit as ``revision``.

    Raises:
        ConfigError: JSON cannot hold a setting.
    """
    capture = capture_of_run(config, model.rows)
    folders = {name: model.files[path] for name, path in argument_folders(config).items()}
    meaning = {
        **config.meaning(),
        "layers": list(model.layers),
        **({} if capture is None else {"source": "taps", "capture": capture}),
        **_of_preset(capture, config.engine_kwargs),
        "weights": model.weights,
        **({"folders": folders} if folders else {}),
        **_lossy(config.codec),
        "tokenizer_sha256": model.tokenizer_sha256,
        "chat_template_sha256": model.chat_template_sha256,
    }
    try:
        return dict(json.loads(json.dumps(meaning)))  # as a resume reads it: names that are numbers become text
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"expected settings that JSON can hold, got others: {e}. Change them") from e


def differences(
    info: Mapping[str, Any], meaning: Mapping[str, Any], written: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return the settings in which a stored run differs: name (``input.text``), stored and present value.

    Args:
        info: the stored ``run.json``.
        meaning: ``run_meaning`` of the present configuration.
        written: ``ExtractConfig.meaning`` as the user wrote it, without commits.
    """
    before, now = dict(info.get("meaning") or {}), dict(meaning)
    if old := "weights" not in before:
        # Earlier versions recorded the revision as written and fewer engine arguments, and hid more values.
        now = {name: value for name, value in now.items() if name not in _NEW}
        now |= {name: written[name] for name in ("revision", "engine_kwargs") if name in now and name in written}
        settings = info.get("settings")
        before |= _lossy(settings["codec"]) if isinstance(settings, Mapping) and "codec" in settings else {}
        used = {**_engine_kwargs(info.get("settings")), **_engine_kwargs(before)}
        if used:
            before["engine_kwargs"] = engine_meaning(used)
    # Earlier versions did not record these in the meaning.
    before = {**_of_preset(before.get("capture"), _engine_kwargs(info.get("settings"))), **before}
    # Earlier versions took fewer texts for credentials, and stored the others as they are.
    return list(_differences(compared_form(before), compared_form(now), old))


def _of_preset(capture: Any, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that choose a preset's points, as a member of the meaning."""
    if not isinstance(capture, Mapping) or "preset" not in capture:
        return {}
    found = {name: engine_kwargs[name] for name in CHOOSE_POINTS if engine_kwargs.get(name) is not None}
    return {"engine_kwargs_of_preset": found} if found else {}


def _lossy(codec: Any) -> dict[str, Any]:
    return {"codec": codec} if resolve_codec(codec).lossy else {}


def _engine_kwargs(settings: Any) -> Mapping[str, Any]:
    found = settings.get("engine_kwargs") if isinstance(settings, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _differences(had: Any, has: Any, old: bool, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    # A template may print the members of an argument in their order.
    ordered = name.startswith("chat_template_kwargs.") and not old
    if isinstance(had, Mapping) and isinstance(has, Mapping) and not ordered:
        unset = None if name in _SETTINGS else _NOT_SET
        for member in sorted({*had, *has}):
            inner = f"{name}.{member}" if name else member
            yield from _differences(had.get(member, unset), has.get(member, unset), old, inner)
    elif _text(had) != _text(has) and not (old and _was_hidden(had, has)):
        yield name, had, has


def _text(value: Any) -> str:
    """JSON text. In Python ``False == 0`` and ``1 == 1.0``; templates and seeds distinguish them."""
    return json.dumps(_with_pairs(value))


def _with_pairs(value: Any) -> Any:
    """Return a copy in which each mapping of one member in a list is a pair with a hidden name.

    Within a secret, ``compared_form`` makes this mapping of a pair if it takes the pair's first text for a secret's
    name, and otherwise hides both texts. Versions differ in these names.
    """
    if isinstance(value, Mapping):
        return {name: _with_pairs(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_pairs(_as_pair(item) if isinstance(item, Mapping) and len(item) == 1 else item) for item in value]
    return value


def _as_pair(member: Mapping[str, Any]) -> list[Any]:
    ((name, value),) = member.items()
    return [compared_form(name, within=True), value]


def _was_hidden(had: Any, has: Any) -> bool:
    """Whether an earlier version stored ``had`` for the setting ``has``: hidden, or a text cut after its URL."""
    if isinstance(had, list) and isinstance(has, list) and len(had) == len(has):
        return all(one == other or _was_hidden(one, other) for one, other in zip(had, has, strict=True))
    return had == HIDDEN or (isinstance(has, str) and (has.startswith(HIDDEN) or public_url(has) == had))
