"""Commands of pages that are not run as they are printed: the program of each accepts its arguments.

The pages: gpu.md, ray-cluster.md, spot.md.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ray.scripts.scripts import cli as ray_cli

import hsx_dist
from hsx_dist.cli import extract, verify
from hsx_dist.cli.app import app
from tests.harness.snippets import snippets

ROOT = Path(hsx_dist.__file__).parents[1]
PAGES = ("docs/gpu.md", "docs/guides/ray-cluster.md", "docs/guides/spot.md")
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands() -> list[tuple[str, list[str]]]:
    """The commands of the pages, with the place of their block."""
    blocks = [s for page in PAGES for s in snippets(ROOT / page) if s.language == "sh"]
    lines = [(s.where, line) for s in blocks for line in s.text.replace("\\\n", " ").splitlines()]
    found = [(where, shlex.split(line.partition(" > ")[0], comments=True)) for where, line in lines]
    return [(where, words) for where, words in found if words and words[0] in ("hsx", "ray", "make", "python")]


def parse(command: Any, words: list[str]) -> list[str]:
    """Parse ``words`` as arguments of ``command``, without running it. Returns a submitted job's command.

    Args:
        command: of click (Ray), or of the click in typer (ours).

    Raises:
        UsageError: of either click; an option or argument is unknown, or absent.
    """
    context = command.make_context(command.name, list(words))
    if hasattr(command, "resolve_command"):  # a group
        _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        return parse(inner, rest)
    return list(context.params.get("entrypoint") or ())


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        assert set(arguments) <= TARGETS
    elif program == "python":
        script = Path(arguments[0])
        assert (ROOT / script).is_file()
        parse(*_of_script(script.stem, arguments[1:]))
    else:
        entry = parse(ray_cli if program == "ray" else typer.main.get_command(app), arguments)
        if entry:
            check(entry)


def _of_script(name: str, arguments: list[str]) -> tuple[Any, list[str]]:
    """The command of ``ray_jobs/NAME.py``, and its arguments."""
    if name == "export":
        return typer.main.get_command(app), ["export", "--ray", *arguments]
    return typer.main.get_command({"extract": extract.job, "verify": verify.job}[name]), arguments


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x[:3]))
def test_a_pages_command_is_accepted_by_its_program(where: str, words: list[str]) -> None:
    check(words)


def test_a_wrong_option_or_target_is_refused() -> None:
    assert {words[0] for _, words in commands()} == {"hsx", "ray", "make"}
    for wrong in ("hsx drain --second 1", "ray start --heads", "ray job submit -- python ray_jobs/extract.py --conf x"):
        with pytest.raises(Exception, match="No such option"):
            check(shlex.split(wrong))
    with pytest.raises(AssertionError):
        check(["make", "nothing"])
