"""Exit statuses of the command line, and what it says about wrong arguments."""

from __future__ import annotations

import pytest
import typer

from hsx_dist.cli import main
from hsx_dist.cli.exit_codes import run_app

LINK = "https://user:SECRET@h/x"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "s3://b/run", LINK], "Error: Got unexpected extra argument"),
        (["ls", "--limit", LINK, "run"], "Error: Invalid value for '--limit'"),
        (["ls", f"--{LINK}"], "Error: No such option"),
        ([LINK], "Error: No such command 'https://h/x'"),
        (["ls"], "Error: Missing argument 'RUN'"),
        (["ls", "\x1b[2J", "\x1b[2J"], "Got unexpected extra argument(s) (\\x1b[2J)"),
    ],
)
def test_a_wrong_argument_is_named_without_its_password(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main(arguments)
    shown = capsys.readouterr()
    assert (e.value.code, shown.out) == (2, "")
    assert said in shown.err
    assert "SECRET" not in shown.err
    assert "Usage: hsx" in shown.err
    assert "\x1b" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["--help"], 0), (["--version"], 0), (["ls", "-h"], 0), (["ls", "."], 2)]
)
def test_help_and_version_are_no_errors(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(arguments)
    shown = capsys.readouterr()
    assert e.value.code == status
    assert bool(shown.err) == (arguments == ["ls", "."])
    assert bool(shown.out) != bool(shown.err)


@pytest.mark.parametrize(
    ("raised", "status"), [(None, 0), (typer.Exit(), 0), (typer.Exit(3), 3), (typer.Abort(), 1), (EOFError(), 1)]
)
def test_a_command_ends_with_its_status(raised: BaseException | None, status: int) -> None:
    app = typer.Typer()

    @app.command()
    def end() -> None:
        if raised is not None:
            raise raised

    with pytest.raises(SystemExit) as e:
        run_app(app, [], "hsx")
    assert e.value.code == status


class PanicException(BaseException):
    """The class of a panic in a library's Rust code."""


def test_a_panic_ends_a_command_without_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise PanicException(f"no answer of {LINK}")

    with pytest.raises(SystemExit) as e:
        run_app(app, [], "hsx")
    shown = capsys.readouterr().err
    assert e.value.code == 1
    assert "SECRET" not in shown
    assert "PanicException: no answer of https://h/x" in shown
