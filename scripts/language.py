"""Check the language of pages, docstrings, comments and messages.

    python -m scripts.language [--counts] [PATH ...]

- Banned words and patterns: ``scripts/banned_words.txt``. They hold for names of functions and classes, too.
- No sentence of a page or a docstring has more than 30 words.
- A message that compares reads ``expected X, got Y``.

Without PATH all pages and all sources (``FOLDERS``) are checked. Exit status 1 means findings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
BANNED = ROOT / "scripts" / "banned_words.txt"
PAGES = ("*.md", "docs/*.md", "docs/guides/*.md", "benchmarks/*.md", "configs/**/*.md")
FOLDERS = ("hsx_dist", "benchmarks", "scripts", "examples", "ray_jobs", "tests")
SOURCES = tuple(f"{folder}/**/*.py" for folder in FOLDERS)
MAX_WORDS = 30

_SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<!vs\.)(?<=[.!?])[\"')\]*]*\s+")
_SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Notes):$")
_ENTRY = re.compile(r"^\s*([-*]|\d+\.|\**\w[\w., *]{0,60}:)\s")
_DIRECTIVE = re.compile(r"\s*(noqa|type:|mypy:|fmt:|pragma|ruff:|!)")
_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LOGS = {"debug", "info", "warning", "error", "exception", "critical", "warning_once", "info_once"}


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{shown}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, a table's cell, a comment, a message or a name. Each piece of code is the word ``code``."""

    line: int
    kind: str
    text: str


# -- rules -------------------------------------------------------------------------------------------------------


@cache
def banned() -> list[tuple[str, re.Pattern[str], str]]:
    """(where, pattern, advice) for each line of the list."""
    rules = []
    for line in BANNED.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            where, pattern, advice = line.split("\t")
            rules.append((where, re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), advice))
    return rules


def sentences(text: str) -> list[str]:
    return [s for s in _SENTENCE_END.split(" ".join(text.split())) if s]


def words(sentence: str) -> int:
    return len([w for w in sentence.split() if re.search(r"\w", w)])


def check_text(path: Path, text: Text) -> Iterator[Finding]:
    for sentence in sentences(text.text):
        for where, pattern, advice in banned():
            found = pattern.search(sentence)
            if found and (where == "all" or text.kind in ("message", "name")):
                yield Finding(path, text.line, f"banned {found[0]!r} ({advice})", sentence)
        count = words(sentence)
        if count > MAX_WORDS and text.kind in ("page", "docstring"):
            yield Finding(path, text.line, f"expected at most {MAX_WORDS} words, got {count}", sentence)
    if text.kind == "message" and not compares_well(text.text):
        yield Finding(path, text.line, "expected 'expected X, got Y' in a message that compares", text.text)


def compares_well(message: str) -> bool:
    """Whether a message that names an expectation also names what it got."""
    if re.search(r"\bexpected\b", message):
        return re.search(r"\bexpected\b.+\bgot\b", message, re.DOTALL) is not None
    return re.search(r"\b(must|should) (be|have)\b", message) is None or re.search(r"\bgot\b", message) is not None


# -- pages -------------------------------------------------------------------------------------------------------


def plain(inline: Token) -> str:
    """The text of a paragraph. Code is one word, an image its description, HTML is dropped."""
    parts = []
    for token in inline.children or []:
        if token.type == "code_inline":
            parts.append("code")
        elif token.type in ("text", "text_special"):
            parts.append(token.content)
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif token.type == "image":
            parts.append(token.content + ". ")
    return "".join(parts)


def page_texts(source: str) -> Iterator[Text]:
    line = 1
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.map:
            line = token.map[0] + 1
        if token.type == "inline":
            # A definition list's ": " starts a new text.
            for item in re.split(r"(?:^|(?<=\s)):\s", plain(token)):
                yield Text(line, "page", item)


# -- sources -----------------------------------------------------------------------------------------------------


def source_texts(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _NAMED) and not hasattr(io.IOBase, node.name):  # a file object needs ``tell``
            yield Text(node.lineno, "name", node.name.replace("_", " ").strip())
        if isinstance(node, ast.Module | _NAMED):
            for statement in node.body:  # a field's docstring follows the field
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield from docstring_texts(inspect.cleandoc(text), statement.lineno)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (Text(node.lineno, "message", m) for m in messages(node.exc))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS:
            yield from (Text(node.lineno, "message", m) for m in messages(node))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            yield Text(node.value.lineno, "docstring", uncoded(rendered(node.value)))
    yield from comment_texts(source)


def docstring_texts(docstring: str, line: int) -> Iterator[Text]:
    """Paragraphs, list items and entries of ``Args:``. Indented blocks outside of a section, and ``>>>``, are code."""
    block: list[str] = []
    begin, in_section, after_blank, example = line, False, True, False

    def taken() -> Iterator[Text]:
        if block:
            yield Text(begin, "docstring", uncoded(" ".join(block)))

    for number, raw in enumerate(docstring.splitlines(), line):
        indented = raw.startswith("    ")
        example = raw.strip().startswith(">>>") or (example and bool(raw.strip()))
        if not raw.strip() or _SECTION.match(raw) or _ENTRY.match(raw):
            yield from taken()
            block = []
        if _SECTION.match(raw):
            in_section = True
        elif raw.strip():
            in_section = in_section and (indented or raw.startswith(" "))
            literal = indented and not in_section and not block and after_blank
            if not literal and not example:
                begin = begin if block else number
                block.append(raw.strip())
        after_blank = not raw.strip() or (after_blank and indented and not block)
    yield from taken()


def comment_texts(source: str) -> Iterator[Text]:
    """Comments. Those on consecutive lines are one text."""
    block: list[str] = []
    last = begin = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#:").strip()
        if block and token.start[0] != last + 1:
            yield Text(begin, "comment", uncoded(" ".join(block)))
            block = []
        if not _DIRECTIVE.match(text):
            begin = begin if block else token.start[0]
            block.append(text)
        last = token.start[0]
    if block:
        yield Text(begin, "comment", uncoded(" ".join(block)))


def uncoded(text: str) -> str:
    return re.sub(r"``.+?``|`[^`]+`", "code", text)


def messages(call: ast.Call) -> Iterator[str]:
    for argument in [*call.args, *(k.value for k in call.keywords)]:
        text = rendered(argument)
        if text.replace("{}", "").strip():
            yield uncoded(text)


def rendered(node: ast.expr) -> str:
    """The text of a string expression; values are ``{}``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(v) for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return rendered(node.left) + rendered(node.right)
    return "{}"


# -- the repository ----------------------------------------------------------------------------------------------


def check(path: Path) -> list[Finding]:
    source = path.read_text(encoding="utf-8")
    texts = source_texts(source) if path.suffix == ".py" else page_texts(source)
    return sorted({f for text in texts for f in check_text(path, text)}, key=lambda f: (f.line, f.rule, f.text))


def files(paths: Iterable[Path] = ()) -> list[Path]:
    """The checked files below ``paths``; without ``paths`` all checked files."""
    known = {p for pattern in (*PAGES, *SOURCES) for p in ROOT.glob(pattern)}
    chosen = [p.resolve() for p in paths]
    return sorted(p for p in known if not chosen or any(p.is_relative_to(c) for c in chosen))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders")
    parser.add_argument("--counts", action="store_true", help="print the number of findings per file")
    arguments = parser.parse_args()
    checked = files(arguments.paths)
    shown = {path: findings for path in checked if (findings := check(path))}
    for path, findings in shown.items():
        if arguments.counts:
            print(f"{len(findings):5} {path.relative_to(ROOT)}")
        else:
            print(*findings, sep="\n")
    if arguments.counts:
        print(f"{sum(map(len, shown.values())):5} findings in {len(shown)} of {len(checked)} files")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
