"""Typer apps whose commands refuse credentials in their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from hsx_dist.config.secrets import secret_paths
from hsx_dist.config.urls import check_url
from hsx_dist.errors import ConfigError

#: Arguments of other forms. A setting is checked by its name where it is read. A sample's key may be any text.
_OTHER = ("KEY=VALUE", "KEY.SUB=VALUE", "KEY")


class _Command(TyperCommand):
    """A command that refuses a credential in each of its texts, before it runs."""

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if value is None or isinstance(value, (bool, int, float)) or parameter.metavar in _OTHER:
                continue
            shown = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.metavar
            for text in value if isinstance(value, (list, tuple)) else [value]:
                refuse_credential(str(shown), str(text))
                check_url(str(text))
        return super().invoke(ctx)


def refuse_credential(name: str, text: str) -> None:
    """Raise ConfigError if ``text``, the argument ``name`` of a command, seems to hold a credential."""
    if list(secret_paths(text)):
        raise ConfigError(
            f"{name}: expected no credential on a command line (job lists show it), got one. Give it by the "
            "environment, a profile or a file of settings"
        )


class Commands(typer.Typer):
    """A typer app. Each of its commands refuses credentials."""

    def __init__(self, **settings: Any) -> None:
        # Pretty exceptions would show local variables, credentials among them.
        super().__init__(pretty_exceptions_enable=False, add_completion=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:  # type: ignore[override]
        return super().command(name, cls=_Command, **settings)
