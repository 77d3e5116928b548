"""A directive for the reference: the commands and their options, from the code itself."""

from __future__ import annotations

from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from hsx_dist.cli.app import app


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


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
