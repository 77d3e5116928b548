"""Credentials in the arguments of commands. Each text of each command is tried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from hsx_dist.cli.app import app
from hsx_dist.cli.exit_codes import run_app
from hsx_dist.cli.extract import job as extract_job
from hsx_dist.cli.verify import job as verify_job

SECRET = "hunter2-not-to-be-seen"
#: Keys of samples, and settings, whose own tests are in test_secrets.
OTHER = ("KEY", "KEY=VALUE", "KEY.SUB=VALUE")
URLS = [f"https://me:{SECRET}@host/x", f"s3:k:{SECRET}/x@b", f"https://host/x?sig={SECRET}"]


def _texts() -> Iterator[Any]:
    """Each app and command, and each of its arguments and options that is a text of a usual form."""
    for name, entry in {"hsx": app, "extract": extract_job, "verify": verify_job}.items():
        top = typer.main.get_command(entry)
        for command, found in getattr(top, "commands", {"": top}).items():
            types = get_type_hints(found.callback)
            for parameter in found.params:
                if re.search("str|Path", str(types[parameter.name])) and parameter.metavar not in OTHER:
                    yield pytest.param(entry, command, found, parameter, id=f"{name}-{command}-{parameter.name}")


def _arguments(command: Any, wanted: Any, value: str) -> list[str]:
    """Arguments with the ``wanted`` one, and with harmless required ones."""
    positional, options = [], []
    for parameter in command.params:
        given = value if parameter is wanted else "x" if parameter.required else None
        if given is None:
            continue
        if parameter.param_type_name == "argument":
            positional.append(given)
        else:
            options += [parameter.opts[-1], given]
    return [*options, *positional]


@pytest.mark.parametrize(("entry", "name", "command", "parameter"), _texts())
@pytest.mark.parametrize("url", URLS)
def test_no_argument_has_a_credential(
    entry: typer.Typer,
    name: str,
    command: Any,
    parameter: Any,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        run_app(entry, [*([name] if name else []), *_arguments(command, parameter, url)], "hsx")
    shown = capsys.readouterr()
    assert (e.value.code, shown.out) == (2, "")
    assert "expected no credential on a command line" in shown.err
    assert SECRET not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_url_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        run_app(app, ["dashboards", "s3:/b/x"], "hsx")
    assert e.value.code == 2
    assert "expected scheme://place/path" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
