"""Log which functions and dataclasses of hsx_dist a process uses, on all threads.

``scripts/house.py`` copies this file as ``sitecustomize.py`` to a folder on ``PYTHONPATH``, so all child processes log.
The interpreter's hook (``sys.settrace``) misses threads that Ray starts in C++. So functions are instrumented when
their module is loaded.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: Environment variable with the logs' folder. Each process writes a file with lines `time_ns thread kind module name`.
FOLDER = "HSX_CALL_LOG"
#: Functions with such a decorator are compiled by numba, torch or triton, and cannot call the log.
COMPILED = ("jit", "compiled", "inlined", "lru_cache")

_files: dict[int, int] = {}


def hit(line: bytes) -> None:
    """Log one use with a single unbuffered ``write``, so that a killed process loses nothing."""
    pid = os.getpid()
    if pid not in _files:
        path = Path(os.environ[FOLDER]) / str(pid)
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[pid], b"%d %d %s\n" % (time.time_ns(), threading.get_ident(), line))


def record(cls: Any) -> Any:
    """Make a dataclass log each construction."""
    line, made = f"type {cls.__module__} {cls.__qualname__}".encode(), cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            hit(line)
        made(self, *args, **kwargs)

    cls.__init__ = init
    return cls


class Instrument(ast.NodeTransformer):
    """Makes functions log their calls, and dataclasses their constructions."""

    def __init__(self, module: str):
        self._module = module

    def visit_FunctionDef(self, node: Any) -> Any:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if any(word in d for d in decorators for word in COMPILED):
            return node
        self.generic_visit(node)
        line = f"call {self._module} {node.name}".encode()
        first = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        call = ast.parse(f"__hsx_hit__({line!r})").body[0]
        node.body.insert(int(first), ast.copy_location(call, node.body[0]))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the visitor's protocol

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        if any(ast.unparse(d).startswith("dataclass") for d in node.decorator_list):
            node.decorator_list.insert(0, ast.copy_location(ast.Name("__hsx_record__", ast.Load()), node))
        return node


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the source: cached bytecode is not instrumented."""
        tree = Instrument(fullname).visit(ast.parse(Path(self.path).read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "hsx_dist":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = Loader(fullname, spec.origin)
        return spec


if FOLDER in os.environ:
    builtins.__hsx_hit__ = hit  # type: ignore[attr-defined]
    builtins.__hsx_record__ = record  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder())
