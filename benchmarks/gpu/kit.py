"""All checks for a GPU, and one page with their results. ``make gpu`` sets up the environment and runs this.

    python -m benchmarks.gpu.kit [--results FOLDER] [--minutes 20] [--only WORD]

Runs tests/gpu, engines of every kind compared with transformers, the copies' bandwidth and the throughput of prefill.
Each check is a separate process. Writes FOLDER/gpu-report.html and FOLDER/gpu-report.json after each check. Without a
GPU it runs the checks for a CPU, and the page names the reason for the others. Exit status 1 means that a check failed,
crashed or timed out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import prefill
from benchmarks.gpu.figures import COPIES, FIGURES, THROUGHPUT
from benchmarks.provenance import ROOT
from hsx_dist.jobs.kit import engine_states
from hsx_dist.jobs.kit.outcomes import Check, Outcome, OutcomeState, python, run_check
from hsx_dist.jobs.kit.process import end_on_sigterm
from hsx_dist.jobs.kit.report_page import about, write

TESTS = "tests on the device"
MINUTES = 20.0
#: pytest's arguments. Without tests/conftest.py, which needs packages that the kit's environment does not have.
PYTEST = ("-q", "-p", "no:cacheprovider", "--confcutdir=tests/gpu", "tests/gpu")


def plan(folder: Path, gpus: int) -> list[Check]:
    """The checks in their order, the most important first."""
    no_gpu = "" if gpus else "no CUDA device"
    small = () if gpus else ("--small", "--seconds", "1")
    return [
        Check(TESTS, "tests/gpu", limit_s=300.0, cannot=no_gpu),
        Check(COPIES, "side-stream copies", python("-m", "benchmarks.gpu.kit", "--copies"), cannot=no_gpu),
        *engine_states.checks(folder, gpus),
        *(
            Check(THROUGHPUT, name, python("-m", "benchmarks.gpu.prefill", sink, *small))
            for sink, name in prefill.SINKS.items()
        ),
    ]


def run_tests(check: Check) -> list[Outcome]:
    """Run tests/gpu. Returns an outcome for each test."""
    with tempfile.TemporaryDirectory(prefix="hsx-kit-tests-") as folder:
        xml = Path(folder, "tests.xml")
        code = (
            "import sys, pytest; from hsx_dist.jobs.kit.outcomes import claim;"
            f"status = int(pytest.main({[*PYTEST, f'--junitxml={xml}']!r}));"
            "claim('passed' if status == 0 else 'failed', f'pytest ended with status {status}')"
        )
        whole = run_check(Check(check.group, check.name, python("-c", code), check.limit_s))
        tests = of_junit(check.group, xml) if xml.exists() else []
    # pytest writes its file at the end. Add the whole run's outcome if there is no file, or if pytest failed although
    # no test did.
    covered = tests and (whole.state == "passed" or any(t.bad for t in tests))
    return tests if covered else [*tests, whole]


def of_junit(group: str, xml: Path) -> list[Outcome]:
    found = []
    for case in ElementTree.parse(xml).iter("testcase"):
        state: OutcomeState = "passed"
        message = ""
        for child in case:
            if child.tag in ("failure", "error"):
                state, message = "failed", f"{child.get('message', '')}\n{child.text or ''}"
            elif child.tag == "skipped":
                state, message = "not run", child.get("message", "")
        found.append(Outcome(group, str(case.get("name")), state, message, float(case.get("time", 0))))
    return found


def run_checks(
    checks: Sequence[Check],
    *,
    seconds: float,
    report: Callable[[list[Outcome]], None],
    run: Callable[[Check], Outcome] = run_check,
) -> list[Outcome]:
    """Run the checks in order, for at most ``seconds``.

    ``report`` is called before the first check and after each, with an outcome for every check. Checks that have not
    begun, or had no time to end, are *not run*.
    """
    end = time.monotonic() + seconds
    outcomes = [
        Outcome(c.group, c.name, "not run", c.cannot or "the program ended before this check began") for c in checks
    ]
    report(outcomes)
    for i, check in enumerate(checks):
        left = end - time.monotonic()
        late = Outcome(check.group, check.name, "not run", f"the {seconds / 60:.0f} minutes were used up")
        if left < min(check.limit_s, 60.0) and not check.cannot:
            outcomes[i] = late
        else:
            outcomes[i] = run(replace(check, limit_s=min(check.limit_s, left)))
            if outcomes[i].state == "timed out" and left < check.limit_s:
                outcomes[i] = replace(late, seconds=outcomes[i].seconds)
        report(outcomes)
    return outcomes


def run_kit(checks: Sequence[Check], results: Path, gpus: Sequence[str], seconds: float) -> list[Outcome]:
    """Run the checks, and write the page after each."""
    head = about(gpus)
    single: dict[str, list[Outcome]] = {}

    def each(check: Check) -> Outcome:
        if check.group != TESTS or check.cannot:
            return run_check(check)
        single[check.name] = tests = run_tests(check)
        worst = next((t for t in tests if t.bad), tests[-1])
        return replace(worst, name=check.name)  # ``spread`` finds the single tests by this name

    def spread(outcomes: Sequence[Outcome]) -> list[Outcome]:
        return [one for o in outcomes for one in (single.get(o.name) if o.group == TESTS else None) or [o]]

    def report(outcomes: list[Outcome]) -> None:
        write(results, head, spread(outcomes), FIGURES)

    return spread(run_checks(checks, seconds=seconds, report=report, run=each))


def measure_copies() -> None:
    """Measure some shapes of ``benchmarks.gpu.copies``. Runs in a separate process, as a check."""
    import torch

    from benchmarks.gpu import copies
    from hsx_dist.jobs.kit.outcomes import claim

    results = []
    with torch.inference_mode():
        for shape in copies.shapes():
            if shape.tokens == 8192:  # neither the shortest requests nor the longest
                results.append(copies.measure(shape, torch.device("cuda"), rounds=2))
                torch.cuda.empty_cache()
    low = min(r["of_limit"] for r in results)
    claim("passed", f"at least {low:.2f} of the device's peak in {len(results)} shapes", {"results": results})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT, help="folder for the page, by default the checkout")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of all checks")
    parser.add_argument("--only", default="", help="run only checks whose group or name contains this word")
    parser.add_argument("--copies", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.copies:
        measure_copies()
        return 0
    end_on_sigterm()
    # The checks' processes import this checkout's modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    gpus = engine_states.visible_gpus()
    with tempfile.TemporaryDirectory(prefix="hsx-kit-") as folder:
        checks = [c for c in plan(Path(folder), len(gpus)) if args.only in f"{c.group}: {c.name}"]
        if not checks:
            parser.error(f"--only: expected a word of a check's name, got {args.only!r}")
        outcomes = run_kit(checks, args.results, gpus, args.minutes * 60)
    for o in outcomes:
        print(f"{o.state:9}  {o.group}: {o.name}: {o.message.partition(chr(10))[0]}")
    print(f"see {args.results / 'gpu-report.html'}")
    return 1 if any(o.bad for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
