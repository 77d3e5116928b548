"""The language of pages, docstrings and messages: the repository is clean, and each rule finds its violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.language import ROOT, check, files, words

LONG = " ".join(["word"] * 31)


def test_sources_of_all_folders_are_checked():
    folders = {path.relative_to(ROOT).parts[0] for path in files() if path.suffix == ".py"}
    assert folders == {"hsx_dist", "benchmarks", "scripts", "examples", "ray_jobs", "tests"}


def test_all_pages_and_sources_are_clean():
    findings = [str(f) for path in files() for f in check(path)]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("The store, whoever uses it, blocks.", ["banned 'whoever'"]),
        ("A block has what is stored.", ["banned 'what is'"]),
        ("What is a block?", []),
        (f"{LONG}.", ["expected at most 30 words, got 31"]),
        (f"{LONG[:-5]}. And `some code of thirty words` more.", []),
        (f"| a | b |\n|---|---|\n| {LONG} | nobody |", ["banned 'nobody'", "expected at most 30 words, got 31"]),
        ("```text\nnobody\n```\n\nUse `nobody`.", []),
        ("First, e.g. this. vLLM blocks, nobody waits.", ["banned 'nobody'"]),
    ],
)
def test_pages(text: str, rules: list[str], tmp_path: Path):
    assert found(tmp_path / "page.md", text) == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""Who is told."""', ["banned 'told'"]),
        (f'def f():\n    """{LONG}."""', ["expected at most 30 words, got 31"]),
        (f'def f():\n    """Do.\n\n    Args:\n        a: {LONG}.\n    """', ["expected at most 30 words, got 32"]),
        (f'"""Do.\n\nThen:\n\n    {LONG} nobody\n"""', []),
        ('"""Do.\n\nExample:\n    >>> f(\n    ... 1)\n    nobody\n\n    Who is told.\n"""', ["banned 'told'"]),
        ('class A:\n    x: int\n    """Who is told."""', ["banned 'told'"]),
        ('Option(help="Who is told.")', ["banned 'told'"]),
        ("x = 1  # nobody", ["banned 'nobody'"]),
        ("x = 'nobody'", []),
        (
            'raise ValueError(f"x: expected 1, came {x}")',
            ["banned 'came'", "expected 'expected X, got Y' in a message"],
        ),
        ('raise ValueError("x: expected 1" f", got {x}. Set it.")', []),
        ('raise ValueError(f"x must be 1: {x}")', ["expected 'expected X, got Y' in a message"]),
        ('logger.warning("nobody reads %s", x)', ["banned 'nobody'"]),
        ('"""It came."""', []),
        ("def _tell_replicas(): ...", ["banned 'tell'"]),
        ("async def test_nobody_waits(): ...", ["banned 'nobody'"]),
        ("class A:\n    def what_came(self): ...", ["banned 'came'"]),
        ("def test_what_is_stored_is_read(): ...", ["banned 'what is'"]),
        ("class lie: ...", ["banned 'lie'"]),
        ("class File:\n    def tell(self): ...", []),
        (f"def expected_{'_'.join(['a'] * 31)}(): ...", []),
        ("def whomever_tellers(nobody): ...", []),
    ],
)
def test_sources(text: str, rules: list[str], tmp_path: Path):
    assert found(tmp_path / "source.py", text) == rules


def found(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [f.rule.partition(" (")[0].removesuffix(" that compares") for f in check(path)]


def test_words_are_counted_without_signs():
    assert words("a ÷ b – c: 3 %") == 4
