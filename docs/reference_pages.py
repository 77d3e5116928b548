"""Directives for the reference: the configuration's fields, the commands and their options, from the code itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, get_args

from docutils import nodes
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from hsx_dist.cli.app import app
from hsx_dist.config import ExtractConfig


class Configuration(SphinxDirective):
    """Every setting of a model of settings and of those below it: name, type, default, description."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        lines = ["| setting | type | default | what it does |", "|---|---|---|---|", *fields(ExtractConfig)]
        return self.parse_text_to_nodes("\n".join(lines))


class Commands(SphinxDirective):
    """Every command of ``hsx`` with what ``--help`` says."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for command in sorted(app.registered_commands, key=_name):
            name = _name(command)
            section = nodes.section(ids=[f"hsx-{name}"], names=[f"hsx {name}"])
            section += nodes.title("", "", nodes.literal("", f"hsx {name}"))
            section += nodes.literal_block(text=said(name), language="text")
            found.append(section)
        return found


def _name(command: Any) -> str:
    return str(command.name or command.callback.__name__)


def said(command: str) -> str:
    """What ``hsx COMMAND --help`` prints on a terminal of 100 columns."""
    env = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    done = CliRunner(env=env).invoke(app, [command, "--help"], prog_name="hsx")
    if done.exit_code:
        raise RuntimeError(f"hsx {command} --help: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


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
    """A type as people say it."""
    text = str(annotation).replace("typing.", "").removeprefix("<class '").removesuffix("'>")
    if "Literal" in text:
        return " or ".join(f"`{v}`" for v in get_args(annotation))
    for long, short in (("pydantic.types.ByteSize", "bytes"), ("str", "text"), ("NoneType", "null"), ("None", "null")):
        text = text.replace(long, short)
    return escape(text)


def default(field: Any) -> str:
    """The default as one writes it in YAML."""
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default is PydanticUndefined else field.default
    if hasattr(value, "human_readable"):
        return f"`{value.human_readable()}`"
    return "`null`" if value is None else "`true`" if value is True else "`false`" if value is False else f"`{value}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("configuration", Configuration)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
