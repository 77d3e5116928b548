"""README and docs: a test runs every block, and every link has a target."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hsx_dist
from benchmarks import charts
from hsx_dist.config import load_config
from hsx_dist.config.loading import MAX_LENGTH
from scripts import settings_page
from tests.harness.snippets import Snippet, as_program, snippets

ROOT = Path(hsx_dist.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages whose blocks another test runs. Some show commands for a server or cluster, which that test starts.
RUN_BY = {
    "docs/format.md": "tests/unit/format/test_golden.py",
    "docs/receipts.md": "tests/unit/format/test_receipts_page.py",
    "docs/guides/serving.md": "tests/integration/test_serving.py",
    "docs/reference.md": "tests/unit/test_reference.py",
    "docs/extending.md": "tests/unit/exporting/test_exporters.py",
    "docs/guides/training.md": "tests/unit/test_guides.py",
    "docs/guides/sparse-autoencoders.md": "tests/unit/test_guides.py",
    "docs/guides/routing-replay.md": "tests/unit/test_guides.py",
    "docs/guides/probes.md": "tests/unit/test_guides.py",
    "docs/guides/other-tools.md": "tests/unit/test_guides.py",
    "docs/guides/on-policy.md": "tests/integration/test_on_policy.py",
    "docs/connector.md": "tests/integration/test_connector_bare.py",
    "docs/capture.md": "tests/integration/test_points_run.py",
    "docs/guides/ray-cluster.md": "tests/unit/test_page_commands.py",
    "docs/guides/spot.md": "tests/unit/test_page_commands.py",
}
#: Pages whose commands no test here can run, and the checks that replace them.
NOT_RUN = {
    "docs/guides/kubernetes.md": "needs Docker and Kubernetes; tests/unit/config/test_cluster_files.py checks the file",
    "docs/guides/one-gpu-machine.md": "needs a GPU and Qwen3-8B; tests/unit/config/test_configs.py loads the file",
    "docs/guides/laptop.md": "the quickstart's calls, compiled, which takes minutes; the same test loads the file",
}
#: Pages that tests/integration/test_documentation.py runs from first to last block.
WHOLE = ("README.md", "docs/quickstart.md", "docs/guides/watching.md", "docs/guides/interpretability.md")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def meant_to_run() -> list[Snippet]:
    return [s for page in PAGES for s in snippets(page) if s.language in ("python", "sh", "yaml")]


@pytest.mark.parametrize("snippet", meant_to_run(), ids=lambda s: s.where)
def test_every_block_is_run_somewhere(snippet: Snippet, monkeypatch: pytest.MonkeyPatch):
    page = name(snippet.page)
    by = snippet.run_by or RUN_BY.get(page)
    if by is not None:
        assert snippet.page.name in (ROOT / by).read_text(), f"{snippet.where}: expected {by} to name the page"
    elif snippet.language == "yaml":
        for variable in re.findall(r"\$\{env:(\w+)\}", snippet.text):
            monkeypatch.setenv(variable, "x")
        load_config(None, (), output="/x", model="m", **yaml.safe_load(snippet.text))
    elif snippet.not_run is None and page not in NOT_RUN:
        assert page in WHOLE, (
            f"{snippet.where}: expected a page of WHOLE, an entry in RUN_BY, or <!-- run by tests/… --> before it"
        )
    if snippet.language == "python":
        compile(snippet.text, snippet.where, "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_has_a_language_and_code_is_marked_as_code(page: Path):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert all(fences[::2]), "expected a language after each opening fence"
    for snippet in snippets(page):
        if snippet.language == "text":
            with pytest.raises(SyntaxError):
                compile(snippet.text, snippet.where, "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_within_the_checkout_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?://)([^)\s#]*)(?:#[^)]*)?\)", page.read_text()):
        if target and not target.startswith('"'):
            assert (page.parent / target).exists(), f"{name(page)}: {target}"


def test_every_module_that_the_map_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`(\w+(?:/\w+)+(?:\.py)?|\w+\.py)`", text))
    assert len(named) > 50
    modules = {path.name for path in (ROOT / "hsx_dist").rglob("*.py")}
    paths = {name: [folder / name for folder in (ROOT, ROOT / "hsx_dist")] for name in named if "/" in name}
    assert named - set(paths) <= modules
    absent = [name for name, at in paths.items() if not any(p.exists() or p.with_suffix(".py").exists() for p in at)]
    assert absent == []


def names_by_file() -> dict[str, list[str]]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {f.stem: re.findall(r"^def (test_\w+)", f.read_text(), re.MULTILINE) for f in files}


def test_every_test_that_the_connectors_page_names_is_there():
    """Each row of its tables names the test that detects a break of the behaviour: ``file: test…``, or a file alone."""
    known = names_by_file()
    rows = [line for line in (ROOT / "docs/connector.md").read_text().splitlines() if line.startswith("|")]
    named = [(row, word) for row in rows for word in re.findall(r"`([^`]*test_[^`]*)`", row)]
    assert len(named) > 50
    for row, word in named:
        file, _, test = word.rpartition(": ")
        begins = re.sub(r"…?(\[\w+\])?$", "", test)
        if not file and begins in known:
            continue  # a whole file
        assert not file or file in known, row
        found = [t for f in ([file] if file else known) for t in known[f] if t.startswith(begins)]
        assert len(found) == 1 if begins == test or file else found, f"{word}: {found}\n{row}"


def test_blocks_run_in_order_in_one_namespace_and_a_failure_names_the_line(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n```python\nx = 41\n```\n\n```sh\nexport Y=1\necho $Y > y\n```\n\n<!-- not run: no cluster -->\n"
        "```sh\nfalse\n```\n\n```python\nimport os\n\nassert os.environ['Y'] == '1'\nassert x == 42\n```\n"
    )
    found = snippets(page)
    assert [s.not_run for s in found] == [None, None, "no cluster", None]
    program = as_program([s for s in found if s.not_run is None])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (tmp_path / "y").read_text() == "1\n"
    assert done.returncode == 1
    assert f'File "{page}", line 21' in done.stderr


def test_the_figures_and_the_chart_of_the_readme_are_those_of_the_last_bench():
    bench = charts.read_bench(ROOT / "benchmarks" / "results" / "bench.json")
    assert charts.table(bench) in (ROOT / "README.md").read_text(), "run `make tables`"
    assert charts.chart(bench) == (ROOT / "docs" / "img" / "benchmark.svg").read_text(), "run `make tables`"


def test_the_page_of_settings_is_the_codes():
    assert f"more than {MAX_LENGTH:,}\ncharacters" in settings_page.page()
    assert settings_page.page() == (ROOT / "docs" / "settings.md").read_text(), "run `make tables`"


def test_the_readme_is_three_screens_and_its_first_has_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert {"make demo", "make test"} <= {line.split("  ")[0] for line in lines[:60]}
