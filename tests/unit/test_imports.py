"""Imports have one direction, and reading a run needs neither Ray, vLLM nor torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hsx_dist
from scripts.house import type_names

PACKAGE = Path(hsx_dist.__file__).parent

#: Package → packages that it may import, in addition to itself.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"config", "errors", "format", "jobs", "model_parts", "page", "reading"},
    "errors": set(),
    "home": {"errors"},
    "regular_files": {"errors"},
    "text": {"config"},
    "logger": {"text"},
    "json_limits": set(),
    "page": {"text"},
    "isa": set(),
    "lazy": set(),
    "new_process": {"observe"},
    "working_folder": {"errors"},
    "memory": set(),
    "config": {"errors", "home", "regular_files"},
    "layers": {"errors", "page"},
    "tokenizers": set(),
    "store": {"errors", "config", "home", "logger", "regular_files", "text"},
    "format": {"errors", "lazy", "page", "config", "store", "logger", "text"},
    "reading": {"config", "errors", "home", "lazy", "layers", "memory", "page", "store", "format", "logger", "text"},
    "models": {"errors", "home", "regular_files", "store", "text"},
    "model_parts": {"errors", "home", "isa", "logger", "models", "page", "format", "reading", "regular_files", "text"},
    "exporting": {"errors", "model_parts", "page", "layers", "format", "reading", "store", "text"},
    "ray_arguments": {"config", "errors"},
    "ray_calls": {"config", "errors", "logger", "new_process", "text"},
    "ray": {"errors", "lazy", "config", "reading", "exporting", "ray_arguments", "ray_calls", "text"},
    "saelens": {"layers", "page", "reading"},
    "serving": {"errors", "page", "connector", "reading", "store", "format", "logger", "text", "writers"},
    "speculators": {"cli", "errors", "config", "new_process", "page", "format", "reading", "store", "text"},
    "observe": {
        *("errors", "logger", "model_parts", "page", "config", "store", "format", "reading", "text"),
        "working_folder",
    },
    "writers": {
        *("errors", "page", "store", "format"),
        *("observe", "memory", "logger", "text", "ray_arguments", "ray_calls"),
    },
    "transport": {"errors", "new_process", "page", "store", "format", "observe", "memory", "logger", "text", "writers"},
    "vllm_patches": {"errors", "logger"},
    "taps": {"errors"},
    "connector": {
        "models",
        "taps",
        "vllm_patches",
        "errors",
        "isa",
        "json_limits",
        "memory",
        "page",
        "config",
        "logger",
        "text",
        "tokenizers",
        "store",
        "format",
        "observe",
        "writers",
        "transport",
    },
    "testing": {"errors", "page", "store", "format"},
    "inputs": {
        "errors",
        "home",
        "regular_files",
        "config",
        "store",
        "format",
        "connector",
        "json_limits",
        "logger",
        "new_process",
        "text",
    },
    "fleet": {
        *(
            "errors",
            "config",
            "store",
            "format",
            "logger",
            "text",
        ),
        *("writers", "transport", "inputs", "models", "observe", "ray_arguments", "ray_calls", "taps", "tokenizers"),
        "working_folder",
    },
    "jobs": {
        *("inputs", "fleet", "ray_arguments", "ray_calls", "taps", "working_folder"),
        *("errors", "home", "isa", "new_process", "page", "config", "layers", "tokenizers", "store", "format"),
        *(
            "writers",
            "connector",
            "reading",
            "observe",
            "models",
            "logger",
            "regular_files",
            "text",
        ),
    },
    "cli": {
        *("errors", "layers", "new_process", "page", "config", "store", "format", "logger", "text"),
        *("reading", "exporting", "ray", "observe", "inputs", "fleet", "jobs"),
    },
}

#: Heavy packages → files or folders that may import them.
HEAVY: dict[str, tuple[str, ...]] = {
    "ray": (
        "ray_arguments.py",
        "ray_calls.py",
        "writers/ray_pool.py",
        "observe/ray_metrics.py",
        "fleet/",
        "jobs/",
        "ray.py",
    ),
    "vllm": ("connector/", "vllm_patches/", "taps/", "fleet/", "inputs/encode.py", "jobs/"),
    "torch": (
        "isa.py",
        "connector/",
        "vllm_patches/",
        "taps/",
        "fleet/",
        "inputs/",
        "jobs/",
        "reading/",
        "exporting/",
        "model_parts/",
        "saelens.py",
        "speculators.py",
        "models/",
        "testing/",
    ),
    "transformers": ("connector/", "inputs/encode.py", "jobs/", "models/"),
}

#: Torch's data sets must inherit from torch's classes.
TORCH_DATA = {
    "reading/torch_data.py",
}
#: Packages that import nothing heavy.
LIGHT = {"reading", "exporting", "model_parts", "cli", "models", "testing", "config", "store", "format"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that ``tree`` imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from hsx_dist import x`: x is a package, or a name of hsx_dist itself
            yield from (
                (f"{node.module}.{name.name}" for name in node.names) if node.module == "hsx_dist" else [node.module]
            )


def imports_on_loading(body: list[ast.stmt]) -> Iterator[str]:
    """The modules that are imported with a module: not in functions, not for the type checker."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_on_loading(node.orelse)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        else:
            yield from imports_on_loading([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_room_has_its_rule() -> None:
    assert {room(path) for path in MODULES} <= set(ALLOWED)


def test_the_rules_have_no_cycle() -> None:
    """A cycle would permit imports in both directions."""
    TopologicalSorter(ALLOWED).prepare()


def test_every_permission_has_a_use() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        used[room(path)] |= {
            name.split(".")[1] for name in imports(ast.parse(path.read_text())) if name.startswith("hsx_dist.")
        }
    assert {me: others - used[me] for me, others in ALLOWED.items() if others - used[me]} == {}


def test_the_map_names_each_room() -> None:
    table = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([a-z_]+)`", row.split(" | ")[0])]
    assert sorted(name for name in named if name not in ("hsx_dist",)) == sorted(set(ALLOWED) - {"__init__"})


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    me = room(path)
    for name in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "hsx_dist" and len(parts) > 1 and parts[1] in ALLOWED:
            assert parts[1] in {me, *ALLOWED[me]}, f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_stay_in_their_rooms(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    tree = ast.parse(path.read_text())
    for name in imports(tree):
        package = name.split(".")[0]
        if package in HEAVY:
            assert relative.startswith(HEAVY[package]), f"{path} imports {name}"
    if room(path) in LIGHT:
        loaded = {name.split(".")[0] for name in imports_on_loading(tree.body)}
        allowed = {"torch"} if relative in TORCH_DATA else set()
        assert not loaded & set(HEAVY) - allowed, f"{path} loads {loaded & set(HEAVY)} when it is imported"


@pytest.mark.parametrize("module", ["hsx_dist", "hsx_dist.reading", "hsx_dist.cli", "tests.harness.servers"])
def test_loading_needs_neither_ray_nor_vllm_nor_torch(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({{'ray', 'vllm', 'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_no_modules_import_each_other() -> None:
    """Imports in functions count, too."""
    names = {".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {name: {other for other in _imported(path, names) if other != name} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(f"expected no import cycle, got {' -> '.join(e.args[1])}")


def _imported(path: Path, names: Collection[str]) -> Iterator[str]:
    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                yield module if module in names else node.module
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return (name for name in walk(ast.parse(path.read_text())) if name in names)


def test_a_type_name_stands_for_one_type() -> None:
    found = Counter(name for path in MODULES for name in type_names(ast.parse(path.read_text())))
    assert [name for name, count in found.items() if count > 1] == []


def test_a_module_name_stands_for_one_module() -> None:
    """Exceptions: commands have the name of the function that they call, and each package may have a ``base``."""
    found = Counter(path.stem for path in MODULES if room(path) != "cli" and path.stem not in ("__init__", "base"))
    assert [name for name, count in found.items() if count > 1] == []


def test_nothing_that_runs_imports_the_tests() -> None:
    for path in MODULES:
        if room(path) != "testing":
            assert not [name for name in imports(ast.parse(path.read_text())) if name.startswith(NOT_FOR_USE)], path


NOT_FOR_USE = ("hsx_dist.testing", "tests", "benchmarks", "scripts")
