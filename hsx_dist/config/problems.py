"""Converts pydantic's errors to one ConfigError, with one line per problem and without credentials."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from hsx_dist.config.checks import nearest
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secret_names import HIDDEN, looks_secret
from hsx_dist.config.urls import has_credentials, is_address
from hsx_dist.errors import ConfigError

_EXPECTED = {
    "byte_size": "a number of bytes, such as 67108864 or 64MiB",
    "byte_size_unit": "a number of bytes, such as 67108864 or 64MiB",
}
#: Problems of a configuration that an error names. A line may name all settings.
MOST_PROBLEMS = 20
#: Length of the shortest value that is hidden within a text. Shorter ones, such as ``1``, are parts of other words.
_SHORTEST_HIDDEN = 4
_NEVER_SHOWN = frozenset({"storage_options", "env"})


def config_error(error: ValidationError, model: type[BaseModel], *, hidden: Collection[str] = ()) -> ConfigError:
    """Return one error with a line per problem: ``field: expected …, got …. What to do``.

    ``hidden``: values of ``${env:NAME}``. No message contains one of at least ``_SHORTEST_HIDDEN`` characters.
    """
    problems = error.errors()
    lines = [line for problem in problems[:MOST_PROBLEMS] for line in _lines(problem, model, hidden)]
    more = [f"… and {len(problems) - MOST_PROBLEMS} more problems"] if len(problems) > MOST_PROBLEMS else []
    return ConfigError("\n".join([*dict.fromkeys(map(redact_text, lines)), *more]))


def _lines(problem: Any, model: type[BaseModel], hidden: Collection[str]) -> Iterator[str]:
    loc = tuple(str(part) for part in problem["loc"])
    field = ".".join(loc)
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, loc[:-1])
        near = nearest(loc[-1], known)
        todo = "Correct the name" if near else f"Known here: {', '.join(known)}"
        yield f"{field}: expected a known setting, got an unknown name{near}. {todo}"
    elif kind == "missing":
        yield f"{field}: expected a value, got nothing. Set it"
    elif kind == "value_error":
        given, text = problem["input"], str(problem["ctx"]["error"])
        if isinstance(given, str) and (has_credentials(given) or is_address(given)):
            text = text.replace(repr(given), _shown_value(given, loc, hidden))
        forms = {form for value in hidden if len(value) >= _SHORTEST_HIDDEN for form in (value, repr(value)[1:-1])}
        if forms:  # one may be a part of another
            text = re.sub("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), HIDDEN, text)
        for line in text.splitlines():
            # A check of several fields names each of them itself.
            yield line if line.partition(":")[0].partition(".")[0] in model.model_fields else f"{field}: {line}"
    else:
        expected = (
            _EXPECTED.get(kind)
            or problem["msg"]
            .removeprefix("Input should be ")
            .removeprefix("String should have ")
            .split(", unable to")[0]
        )
        came = _shown_value(problem["input"], loc, hidden)
        members = _fields_at(model, loc) if kind == "model_type" else []
        if kind in ("model_type", "dict_type") and "=" in came:
            came = "a text"  # such as token=…
        if members:
            expected, todo = "a group of settings", f"Set its members, such as {field}.{members[0]}"
        elif kind == "string_type" and isinstance(problem["input"], (int, float)):
            todo = "Put it in quotes"
        else:
            todo = "Correct it"
        yield f"{field}: expected {expected}, got {came}. {todo}"


def _shown_value(value: object, loc: tuple[str, ...], hidden: Collection[str]) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"  # Python converts no long one to text
    if (
        _NEVER_SHOWN.intersection(loc)
        or any(looks_secret(part) for part in loc)
        or any(h in str(value) for h in hidden if h)
        or has_credentials(str(value))
        or is_address(str(value))
    ):
        return f"a {type(value).__name__} that is not shown here"
    text = redact_text(repr(value))  # before the cut: half a credential is not recognized
    return text if len(text) <= 80 else text[:77] + "…"


def _fields_at(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    for name in path:
        field = model.model_fields.get(name)
        inner = [t for t in _types(field.annotation) if issubclass(t, BaseModel)] if field else []
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _types(annotation: Any) -> Iterator[type]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for arg in typing.get_args(annotation):
            yield from _types(arg)
    elif isinstance(annotation, type):
        yield annotation
