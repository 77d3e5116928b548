"""docs/settings.md: every setting of an extraction, from the code itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hsx_dist.config import ExtractConfig
from hsx_dist.config.loading import MAX_LENGTH

HEAD = f"""# Settings

<!-- Written by `make tables`. -->

Settings of `hsx_dist.ExtractConfig`, of a YAML file for `hsx extract --config FILE`, and of `key.sub=value` on a
command line. A name with a dot is a member of a group. Sizes are numbers of bytes, or texts such as `64MiB`. A name
that is not in this table is refused. So is an integer of more than 64 bits, and a file of more than {MAX_LENGTH:,}
characters. Numbers follow YAML 1.1, except that a value such as `12:30` is text.

"""


def page() -> str:
    """The whole page."""
    lines = ["| setting | type | default | what it does |", "|---|---|---|---|", *fields(ExtractConfig)]
    return HEAD + "\n".join(lines) + "\n"


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A row for each field; a group's fields follow it, with its name before theirs."""
    for name, field in model.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield f"| `{prefix}{name}` | | | **{escape(field.description or '')}** |"
            yield from fields(group, f"{prefix}{name}.")
            continue
        yield f"| `{prefix}{name}` | {kind(field.annotation)} | {default(field)} | {escape(field.description or '')} |"


def kind(annotation: Any) -> str:
    """A type in the words of a YAML file."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(kind, get_args(annotation)))
    text = str(annotation).replace("typing.", "").removeprefix("<class '").removesuffix("'>")
    if "Literal" in text:
        return " or ".join(f"`{v}`" for v in get_args(annotation))
    for long, short in (("pydantic.types.ByteSize", "bytes"), ("str", "text"), ("NoneType", "null"), ("None", "null")):
        text = text.replace(long, short)
    return escape(text)


def default(field: Any) -> str:
    """The default as YAML."""
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default is PydanticUndefined else field.default
    if hasattr(value, "human_readable"):
        return f"`{value.human_readable()}`"
    return "`null`" if value is None else "`true`" if value is True else "`false`" if value is False else f"`{value}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
