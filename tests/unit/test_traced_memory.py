"""Tests trace memory in one way, which cannot crash their process, and those that do run last."""

from __future__ import annotations

import ast
import tracemalloc
from pathlib import Path

import pytest

import hsx_dist
from tests.harness.traced_memory import trace_memory

ROOT = Path(hsx_dist.__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "hsx_dist", "scripts", "tests")


@pytest.mark.traced
def test_each_trace_begins_at_zero() -> None:
    for _ in range(2):
        trace_memory()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        held = bytes(4 << 20)
        assert tracemalloc.get_traced_memory()[0] > len(held)
        trace_memory()
        del held
        assert 0 <= tracemalloc.get_traced_memory()[0] < 1 << 20


def test_one_module_starts_to_trace_and_none_stops() -> None:
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if "tracemalloc" in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Attribute(attr="start" | "stop" as name, value=ast.Name(id="tracemalloc")):
                        found.add((path.relative_to(ROOT).as_posix(), name))
                    case ast.ImportFrom(module="tracemalloc") | ast.alias(name="tracemalloc", asname=str()):
                        pytest.fail(f"expected `import tracemalloc`, got another import in {path}")
    assert found == {("tests/harness/traced_memory.py", "start")}


@pytest.mark.traced
def test_tests_that_trace_run_last(request: pytest.FixtureRequest) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    own, module = request.node, request.node.parent
    items = [own, module, own]
    conftest.pytest_collection_modifyitems(items)
    assert items == [module, own, own]
