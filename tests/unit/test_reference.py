"""The reference page: every public name has an example, and the examples are run."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import pkgutil
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sphinx.ext.napoleon import GoogleDocstring

import hsx_dist
from hsx_dist import errors
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.exporting import SampleLeftOut, export
from hsx_dist.format import codecs
from hsx_dist.models.builtin import SMOLLM2
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.points import PointSample, run_of
from tests.harness.runs import store_run
from tests.harness.snippets import snippets

ROOT = Path(hsx_dist.__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
_DIRECTIVE = re.compile(r"^\.\. auto[a-z]+:: (?P<name>[\w.]+).*\n(?P<options>(?:   :.*\n)*)", re.MULTILINE)
_SHELL = re.compile(r"^    \.\. code-block:: sh\n\n(?P<text>(?:^ {8}.*\n?)+)", re.MULTILINE)
#: Importing these takes seconds: their docstrings are read from the source.
_NOT_IMPORTED = ("hsx_dist.connector.connector.",)


@dataclass(frozen=True)
class Entry:
    """A function or class of the page. ``options``: of its directive."""

    name: str
    options: Mapping[str, str]

    @property
    def docstring(self) -> str:
        if self.name.startswith(_NOT_IMPORTED):
            module, _, name = self.name.rpartition(".")
            tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
            found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
            return ast.get_docstring(found) or ""
        return inspect.getdoc(pkgutil.resolve_name(self.name)) or ""

    def members(self) -> dict[str, str]:
        """Docstrings of the members that the page shows, by name."""
        if "no-members" in self.options:
            return {}
        kind = pkgutil.resolve_name(self.name)
        if not isinstance(kind, type):
            return {}
        chosen = [name.strip() for name in self.options.get("members", "").split(",") if name.strip()]
        left_out = [name.strip() for name in self.options.get("exclude-members", "").split(",")]
        special = self.options.get("special-members")
        return {
            name: inspect.getdoc(member) or ""
            for name, member in vars(kind).items()
            if inspect.isroutine(member) or isinstance(member, property)
            if name == special or not name.startswith("_")
            if name in chosen or (not chosen and name not in left_out)
            if member.__doc__ or not any(name in vars(base) for base in kind.__mro__[1:])
        }


def entries() -> list[Entry]:
    return [
        Entry(m["name"], dict(re.findall(r":([\w-]+): ?(.*)", m["options"])))
        for m in _DIRECTIVE.finditer(PAGE.read_text())
    ]


#: Shown by the directive for their module.
ERRORS = {kind for kind in vars(errors).values() if isinstance(kind, type)}
#: ``SampleLeftOut`` is an error, too.
EXAMPLES = [entry for entry in entries() if not entry.name.endswith(".SampleLeftOut")]


def shell(docstring: str) -> list[str]:
    """The command lines of an example."""
    return [m["text"] for m in _SHELL.finditer(docstring)]


@pytest.mark.parametrize("package", ["hsx_dist", "hsx_dist.reading", "hsx_dist.exporting", "hsx_dist.serving"])
def test_the_page_has_every_public_name(package: str) -> None:
    shown = {pkgutil.resolve_name(entry.name) for entry in entries() if not entry.name.startswith(_NOT_IMPORTED)}
    public = {name for name in pkgutil.resolve_name(package).__all__ if name != "__version__"}
    assert [name for name in public if pkgutil.resolve_name(f"{package}.{name}") not in shown | ERRORS] == []


def examples(docstring: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(docstring)


@pytest.mark.parametrize("entry", EXAMPLES, ids=lambda entry: entry.name)
def test_every_function_and_class_has_an_example_that_uses_its_members(entry: Entry) -> None:
    members = entry.members()
    assert all(members.values()), "expected a docstring of every member that is public, or exclude-members"
    own = examples(entry.docstring)
    assert "\nExample:\n" in entry.docstring
    assert own or shell(entry.docstring)
    docstrings = (entry.docstring, *members.values())
    code = "\n".join(example.source for docstring in docstrings for example in examples(docstring))
    used = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    lacking = [name for name, docstring in members.items() if name not in used and not examples(docstring)]
    assert lacking == []


def test_every_error_says_when_it_is_raised() -> None:
    assert errors in [pkgutil.resolve_name(entry.name) for entry in EXAMPLES if entry.name.endswith(".errors")]
    assert all(issubclass(kind, Exception) and vars(kind)["__doc__"] for kind in {*ERRORS, SampleLeftOut})


def rendered(docstring: str, kind: str) -> str:
    """The docstring as Sphinx's napoleon writes it. ``kind``: ``property``, or any other kind of object."""
    return str(GoogleDocstring(docstring, what=kind, name="name"))


def misread(text: str) -> list[str]:
    """Lines of napoleon's in which it took the text before a colon for a type, or ``B.`` for the number of a list."""
    return re.findall(r"^:r?type:.*|^:param \w+:\s+[A-Z]\.\s", text, re.MULTILINE)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_sphinx_reads_no_sentence_as_a_type(entry: Entry) -> None:
    assert misread(rendered(entry.docstring, "class")) == []
    for name, docstring in entry.members().items():
        member = vars(pkgutil.resolve_name(entry.name))[name]
        assert misread(rendered(docstring, "property" if isinstance(member, property) else "method")) == [], name


@pytest.mark.parametrize(
    ("docstring", "kind"),
    [
        ("Version: 1 or 2.", "property"),
        ("Read.\n\nReturns:\n    The run. It can be pickled: it is small.", "function"),
        ("Read.\n\nArgs:\n    tokens: B. The last batch may be smaller.", "function"),
    ],
)
def test_a_sentence_that_sphinx_misreads_is_found(docstring: str, kind: str) -> None:
    assert len(misread(rendered(docstring, kind))) == 1


# -- the examples --------------------------------------------------------------------------------------------------


def write_runs() -> None:
    """The runs that the page describes."""
    lines = (ROOT / "configs" / "demo" / "prompts.jsonl").read_text().splitlines()
    keys = [json.loads(line)["id"] for line in lines[:3]]
    about = {"model": SMOLLM2, "num_hidden_layers": 30}
    layers = (2, 15, 27, 30)
    for name in ("demo", "other"):
        samples = [
            random_sample(key, 20 + 2 * i, layer_ids=layers, hidden_size=576, seed=i, odd=False)
            for i, key in enumerate(keys)
        ]
        info = {"meaning": {"model": SMOLLM2, "layers": list(layers)}}
        store_run(open_store(f"runs/{name}"), samples, info=info, about=about)
    rows = {
        name: random_sample(keys[0], 20, layer_ids=(15,), hidden_size=64 * heads, seed=heads, odd=False)
        for name, heads in (("q", 9), ("k", 3))
    }
    columns = [
        (replace(sample, token_ids=rows["q"].token_ids), {"point": name, "head": 64, "column": i})
        for i, (name, sample) in enumerate(rows.items())
    ]
    stored = PointSample(keys[0], rows["q"].token_ids, {name: s.states for name, s in rows.items()}, tuple(columns))
    run_of(stored.segments(0), store=open_store("runs/points"), meaning={"model": SMOLLM2}, about=about)


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the page's first lines make, in a folder with its runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reference"))
        patch.setattr(codecs, "CODECS", dict(codecs.CODECS))
        patch.setattr(codecs, "CODEC_NAMES", set(codecs.CODEC_NAMES))
        patch.setattr(export, "EXPORTERS", dict(export.EXPORTERS))
        write_runs()
        [lines] = snippets(PAGE)
        names: dict[str, Any] = {"__name__": "reference"}
        exec(compile(lines.text, lines.where, "exec"), names)
        yield names


def run(name: str, docstring: str, names: dict[str, Any]) -> None:
    """Run the examples of a docstring in the namespace ``names``. Those with ``+SKIP`` are checked without a run."""
    test = doctest.DocTestParser().get_doctest(docstring, names, name, None, 0)
    test.globs = names  # not the copy, which the next docstring would not see
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(test, out=out.append, clear_globs=False)
    assert result.failed == 0, "".join(out)
    for example in test.examples:
        if example.options.get(doctest.SKIP):
            check_calls(example.source, names)


def check_calls(source: str, names: Mapping[str, Any]) -> None:
    """Bind the arguments of each call to the signature of the function, if it is one of ``names``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            signature = inspect.signature(names[node.func.id])
            bound = signature.bind(*node.args, **{k.arg: k.value for k in node.keywords if k.arg is not None})
            assert not any(signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD for name in bound.arguments)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("entry", EXAMPLES, ids=lambda entry: entry.name)
def test_the_examples_run(entry: Entry, begin: dict[str, Any]) -> None:
    names = dict(begin)
    for name, docstring in {"": entry.docstring, **entry.members()}.items():
        run(f"{entry.name} {name}", docstring, names)


COMMANDS = [(entry.name, command) for entry in EXAMPLES for command in shell(entry.docstring)]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_the_servers_arguments_are_valid(name: str, command: str) -> None:
    """``tests/integration/test_serving.py`` starts a server with them."""
    program, verb, model, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, verb, model) == ("vllm", "serve", "MODEL")
    arguments = dict(zip(words[::2], words[1::2], strict=True))
    assert json.loads(arguments["--speculative-config"])["method"] == "extract_hidden_states"
    transfer = json.loads(arguments["--kv-transfer-config"])
    assert transfer["kv_connector"] == "HiddenStatesConnector"
    settings = read_connector_config(transfer["kv_connector_extra_config"])
    assert settings.output == "s3://bucket/states"
    assert name.rpartition(".")[2] in (transfer["kv_connector"], arguments.get("--middleware", "").rpartition(".")[2])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("extract([], model='m', output='o', layers=[1])", None),
        ("extract([], model='m')", TypeError),
        ("extract([], model='m', output='o', max_rows=1)", AssertionError),
        ("extrct([])", KeyError),
    ],
)
def test_a_wrong_call_in_an_example_that_does_not_run_is_found(source: str, error: type[Exception] | None) -> None:
    names = {"extract": hsx_dist.extract}
    if error is None:
        check_calls(source, names)
    else:
        with pytest.raises(error):
            check_calls(source, names)


def test_a_wrong_result_in_an_example_is_found() -> None:
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run("f", "Add.\n\n    >>> 1 + 1\n    3\n", {})
