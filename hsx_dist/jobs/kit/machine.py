"""``hsx doctor --engine`` without settings: this machine, and engines of every kind that it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsx_dist.jobs import doctor
from hsx_dist.jobs.diagnosis import Diagnosis, State
from hsx_dist.jobs.kit import engine_states
from hsx_dist.jobs.kit.outcomes import Check, Outcome, run_check
from hsx_dist.jobs.kit.report_page import about, write


def examine_machine(report: Path | None, wanted: Sequence[engine_states.Case] | None = None) -> Iterator[Diagnosis]:
    """Yield each check as soon as it ends. ``report``: folder for the page, written again after each engine."""
    failed = False
    for check in doctor.examine(None):
        failed |= check.state == "fail"
        yield check
    gpus = engine_states.visible_gpus()
    with tempfile.TemporaryDirectory(prefix="hsx-doctor-") as folder:
        planned = engine_states.checks(Path(folder), len(gpus), wanted)
        if failed:
            planned = [_left_out(p) for p in planned]
        outcomes = [Outcome(p.group, p.name, "not run", "the program ended before this check began") for p in planned]
        if report is not None:  # a folder that cannot be written ends the command before the first engine
            write(report, about(gpus), outcomes)
        for i, engine in enumerate(planned):
            outcomes[i] = run_check(engine)
            if report is not None:
                write(report, about(gpus), outcomes)
            yield shown(outcomes[i])


def _left_out(planned: Check) -> Check:
    return Check(planned.group, planned.name, cannot="a check of the machine failed. Correct that first")


def shown(outcome: Outcome) -> Diagnosis:
    """An outcome as a line of ``hsx doctor``. An engine that did not run is a warning."""
    state: State = "ok" if outcome.state == "passed" else "fail" if outcome.bad else "warn"
    said = outcome.message if state == "ok" else f"{outcome.state}: {outcome.message}"
    return Diagnosis(outcome.name, state, said)
