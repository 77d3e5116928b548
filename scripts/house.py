"""Measure the size of ``hsx_dist``: modules and types on two code paths, duplicate names, lengths. Prints Markdown.

    python scripts/house.py [--static]

The two code paths are traced in a real run of one row. It has a local Ray cluster, one replica with vLLM in its
process, one writer, and a folder as the store. ``scripts/call_log.py`` logs each call in each process.

- Path of a page: modules whose functions are called in the replica's or the writer's process, and the dataclasses
  constructed there. It begins with the first step that schedules the row (``build_connector_meta``). It ends when the
  receipt is stored.
- Path of a sample: modules whose functions are called by ``load_hidden_states(run, key)``, and the dataclasses
  constructed there. Code that runs at import does not count.
- Types for a segment's location: dataclasses of ``format/`` and ``reading/`` with a field of ``Segment``, its pieces or
  such a class; and classes whose ``__getitem__`` returns one.
- Senders of pages: classes with a method ``send(pages, release)``. Protocols do not count.
- Functions are counted without their docstrings.

``--static`` leaves out the run, which takes a minute.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hsx_dist"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in SOURCES}

_LOAD = """
import sys, time
from hsx_dist.reading import load_hidden_states
before = time.time_ns()
states = load_hidden_states(sys.argv[1], "one")["hidden_states"]
print(before, time.time_ns(), type(states).__name__, *states.shape)
"""
_MODEL = (
    "import sys; from pathlib import Path; from hsx_dist.models.tiny import tiny_llama; tiny_llama(Path(sys.argv[1]))"
)
_SETTINGS = [
    *("engine_kwargs.dtype=float32", "engine_kwargs.max_model_len=256", "engine_kwargs.enforce_eager=true"),
    *(
        "layers=[0,2,last]",
        "codec=split",
        "page_bytes=64KiB",
        "segment_bytes=128KiB",
        "in_flight_bytes=1MiB",
        "writers.num_cpus=0",
    ),
    *("pool=ray", "min_replicas=1", "max_replicas=1", "writers.credit_bytes=1MiB", "check_samples=0"),
]

Row = tuple[str, int | str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a table of the package's size.")
    parser.add_argument("--static", action="store_true", help="leave out the paths of a page and of a sample")
    rows = [] if parser.parse_args().static else walks()
    rows += [*names(), *lengths()]
    print("| measure | count | names |\n|---|---|---|")
    for what, count, which in rows:
        print(f"| {what} | {count} | {which} |")


# -- the code paths ----------------------------------------------------------------------------------------------


def walks() -> list[Row]:
    """Run one row through the Ray pool, and load its sample."""
    with tempfile.TemporaryDirectory(prefix="hsx-house-") as name:
        folder = Path(name)
        shutil.copy(ROOT / "scripts" / "call_log.py", folder / "sitecustomize.py")
        (folder / "rows.jsonl").write_text(json.dumps({"id": "one", "token_ids": list(range(100))}) + "\n")
        run([sys.executable, "-c", _MODEL, str(folder / "model")], folder)
        paths = [f"output={folder / 'run'}", f"model={folder / 'model'}", f"input.path={folder / 'rows.jsonl'}"]
        run([sys.executable, "-m", "hsx_dist.cli", "extract", *paths, *_SETTINGS], folder, "extract")
        stored = min(p.stat().st_mtime_ns for p in (folder / "run").rglob("manifest/**/*") if p.is_file())
        page = page_uses(folder / "extract", stored)
        began, ended, *_ = run([sys.executable, "-c", _LOAD, str(folder / "run")], folder, "load").split()
        sample = [use for log in uses(folder / "load").values() for use in log if int(began) <= use[0] <= int(ended)]
        return [
            way("modules on a page's path", page, "call"),
            way("types on a page's path", page, "type"),
            way("modules from URI to tensor", sample, "call"),
            way("types from URI to tensor", sample, "type"),
        ]


def run(command: list[str], folder: Path, log: str = "") -> str:
    """Run a command and return its output. With ``log``, its calls are logged to that subfolder of ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if log:
        (folder / log).mkdir()
        environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HSX_CALL_LOG": str(folder / log)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"expected {' '.join(command)} to end with 0, got {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


Use = tuple[int, str, str, str]


def uses(folder: Path) -> dict[str, list[Use]]:
    """(time, "call" or "type", module, name), by process."""
    found: dict[str, list[Use]] = defaultdict(list)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            at, _, kind, module, name = line.split(" ")
            found[path.name].append((int(at), kind, module, name))
    return found


def page_uses(folder: Path, stored: int) -> list[Use]:
    """Uses in the replica's and the writer's process between the first step and ``stored``.

    The driver's process is left out: its log has ``take_attempt``.
    """
    actors = [log for log in uses(folder).values() if not any(name == "take_attempt" for *_, name in log)]
    began = min(at for log in actors for at, _, _, name in log if name == "build_connector_meta")
    return [use for log in actors for use in log if began <= use[0] <= stored]


def way(what: str, found: Iterable[Use], kind: str) -> Row:
    chosen = {(module, name) for _, k, module, name in found if k == kind}
    shown = {m.removeprefix("hsx_dist.") for m, _ in chosen} if kind == "call" else {name for _, name in chosen}
    return what, len(shown), ", ".join(sorted(shown))


# -- the sources -------------------------------------------------------------------------------------------------


def names() -> list[Row]:
    classes = Counter(name for tree in TREES.values() for name in type_names(tree))
    # A command's module may have the name of the module that it calls, and each subpackage may have a base.
    stems = Counter(
        Path(p).stem for p in TREES if not p.startswith("cli/") and Path(p).stem not in ("__init__", "base")
    )
    twice = [name for found in (classes, stems) for name, count in found.items() if count > 1]
    imported = [p for p, tree in TREES.items() if not p.startswith("testing/") and imports_testing(tree)]
    located = locations()
    return [
        ("senders of pages", len(senders()), ", ".join(senders())),
        ("types for a segment's location", len(located), ", ".join(sorted(located))),
        ("names of two types or modules", len(twice), ", ".join(twice)),
        ("imports of testing/", len(imported), ", ".join(imported)),
    ]


def type_names(module: ast.Module) -> Iterator[str]:
    """Names of a module's classes and type aliases. Aliases are recognized by CamelCase."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", t.id))


def imports_testing(tree: ast.AST) -> bool:
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(module.startswith(("hsx_dist.testing", "tests")) for module in modules)


def locations() -> set[str]:
    """Dataclasses with a ``Segment`` or its ``pieces``, and their collections, without writers' buffers."""
    fields: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        if path.startswith(("format/", "reading/")) and "write" not in path:
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    fields[node.name] = set(re.findall(r"\w+", " ".join(held(node))))
    found: set[str] = set()
    while more := {name for name, used in fields.items() if used & {"Segment", "pieces", *found}} - found:
        found |= more
    return found | {"Segment"}


def held(node: ast.ClassDef) -> Iterator[str]:
    """Source of a dataclass's fields, and the return types of ``__getitem__``."""
    dataclass = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    for part in node.body:
        if dataclass and isinstance(part, ast.AnnAssign):
            yield ast.unparse(part)
        elif isinstance(part, ast.FunctionDef) and part.name == "__getitem__" and part.returns is not None:
            yield ast.unparse(part.returns)


def senders() -> list[str]:
    """Classes with their own ``send(pages, release)``."""
    return [
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "Protocol" not in {ast.unparse(base) for base in node.bases}
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "send"
        if [argument.arg for argument in method.args.args] == ["self", "pages", "release"]
    ]


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(function) is not None else 0


def lengths() -> list[Row]:
    functions = [
        (node.end_lineno - node.lineno + 1 - docstring_lines(node), f"{path}:{node.name}")
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    long = [f"{name} ({lines})" for lines, name in functions if lines > 50]
    rules = ["--isolated", "--select", "C901", "--config", "lint.mccabe.max-complexity=15"]
    command = [sys.executable, "-m", "ruff", "check", *rules, "--output-format", "json", str(PACKAGE)]
    complex_ = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    sizes = {path: len((PACKAGE / path).read_text().splitlines()) for path in TREES}
    longest = max(sizes, key=lambda path: sizes[path])
    over = [f"{path} ({n})" for path, n in sizes.items() if n > 450]
    return [
        ("functions over 50 lines", len(long), ", ".join(long)),
        ("functions of a complexity over 15", len(complex_), ", ".join(m["message"].split("`")[1] for m in complex_)),
        ("lines of hsx_dist", sum(sizes.values()), f"{len(sizes)} modules"),
        ("median module", int(statistics.median(sizes.values())), "lines"),
        ("longest module", sizes[longest], longest),
        ("modules over 450 lines", len(over), ", ".join(over)),
    ]


if __name__ == "__main__":
    main()
