"""The fenced blocks of Markdown pages, for tests that run the documentation's code.

Tests run each block of ``python``, ``sh`` or ``yaml``, except after two HTML comments. ``<!-- run by tests/… -->``
names the test that runs the block. ``<!-- not run: why -->`` says why it cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>.+?) -->\n)?^```(?P<language>[a-z]+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block. ``mark`` is the comment before it, or empty."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def run_by(self) -> str | None:
        """The path of the test that runs the block. None if the page's test runs it, or if it is not run."""
        return self.mark.removeprefix("run by ") if self.mark.startswith("run by ") else None

    @property
    def not_run(self) -> str | None:
        """The reason why the block is not run, or None."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None


def snippets(page: Path) -> list[Snippet]:
    """A page's blocks with a language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(page, text.count("\n", 0, m.start("language")) + 1, m["language"], m["text"], m["mark"] or "")
        for m in _BLOCK.finditer(text)
    ]


def as_program(found: Sequence[Snippet]) -> str:
    """A Python program that runs the ``python`` and ``sh`` blocks in order.

    All Python blocks share a namespace. Each ``sh`` block runs in a bash that stops at the first command that fails. A
    failure names the page and the line.
    """
    lines = ["import os, subprocess", "names = {'__name__': '__main__'}"]
    for s in found:
        lines.append(f"print('--', {s.where!r}, flush=True)")
        if s.language == "python":
            padded = "\n" * s.line + s.text  # so that a traceback shows the page's line
            lines.append(f"exec(compile({padded!r}, {str(s.page)!r}, 'exec'), names)")
        elif s.language == "sh":
            # Variables that a block exports stay set in the next blocks, as in a user's shell.
            script = f"{s.text}\nenv -0 > .snippet-environment\n"
            lines.append(f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {script!r}], check=True)")
            lines.append("variables = open('.snippet-environment').read().split('\\0')")
            lines.append("os.environ.update(v.split('=', 1) for v in variables if '=' in v)")
    return "\n".join(lines) + "\n"
