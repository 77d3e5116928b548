"""The outcome of a check equals the result of its process, and is never better."""

from __future__ import annotations

import time

import pytest

from benchmarks.gpu.kit import run_checks
from hsx_dist.jobs.kit.outcomes import Check, Outcome, python, run_check

CLAIM = "from hsx_dist.jobs.kit.outcomes import claim; import os, sys, signal, time, subprocess;"
PASSED = "claim('passed', 'well', {'n': 1});"


def check(code: str, **more) -> Check:
    return Check("group", "name", python("-c", CLAIM + code), **more)


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        (PASSED, "passed", "well"),
        ("claim('failed', 'wrong states')", "failed", "wrong states"),
        ("claim('not run', 'vLLM ran otherwise')", "not run", "vLLM ran otherwise"),
        ("pass", "crashed", "without a result"),
        ("print('last words'); 1 / 0", "crashed", "ZeroDivisionError"),
        (PASSED + "sys.exit(3)", "crashed", "status 3"),
        (PASSED + "os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("claim('perfect', '')", "crashed", "without a result"),
        ("open(os.environ['HSX_KIT_RESULT'], 'w').write('{')", "crashed", "without a result"),
        (PASSED + "print('begun', flush=True); time.sleep(600)", "timed out", "begun"),
    ],
)
def test_a_check_reads_as_what_it_was(code, state, words):
    outcome = run_check(check(code, limit_s=10.0 if state == "timed out" else 60.0))
    assert outcome.state == state, outcome
    assert words in outcome.message
    assert outcome.figures == ({"n": 1} if state == "passed" else {})


@pytest.mark.parametrize(
    "code",
    [
        "claim('failed', 'got 401 for https://user:SECRET@h/x')",
        "print('of https://user:SECRET@h/' + 1490 * 'x'); sys.exit(3)",
    ],
)
def test_the_message_has_no_credentials(code):
    outcome = run_check(check(code))
    assert outcome.bad
    assert "SECRET" not in outcome.message


def test_a_check_that_cannot_run_is_not_started():
    outcome = run_check(Check("group", "name", ("/no/such/program",), cannot="no CUDA device"))
    assert (outcome.state, outcome.message) == ("not run", "no CUDA device")


def test_what_a_check_started_ends_with_it(tmp_path):
    alive = tmp_path / "alive"
    writes = f"import time\nwhile True: open({str(alive)!r}, 'a').write('.') and time.sleep(0.05)"
    starts = f"subprocess.Popen([sys.executable, '-c', {writes!r}], start_new_session=True);"
    waits = f"[time.sleep(0.05) for _ in range(400) if not os.path.exists({str(alive)!r})]; time.sleep(600)"
    outcome = run_check(check(starts + waits, limit_s=12.0))
    assert outcome.state == "timed out"
    size = alive.stat().st_size
    assert size > 0
    time.sleep(0.5)
    assert alive.stat().st_size == size


def test_a_check_without_its_turn_is_not_run():
    checks = [Check("g", "a"), Check("g", "b", cannot="no GPU"), Check("g", "c")]
    seen: list[list[str]] = []

    def run(one: Check) -> Outcome:
        if one.name == "c":
            raise KeyboardInterrupt
        return Outcome(one.group, one.name, "not run" if one.cannot else "passed", one.cannot)

    with pytest.raises(KeyboardInterrupt):
        run_checks(checks, seconds=600, report=lambda o: seen.append([x.state for x in o]), run=run)
    assert seen == [["not run"] * 3, ["passed", "not run", "not run"], ["passed", "not run", "not run"]]
    (late, *_), ran = run_checks(checks[:1], seconds=0, report=lambda _: None, run=run), []
    assert (late.state, ran) == ("not run", [])
    assert "used up" in late.message


def test_a_check_has_the_time_that_is_left():
    """A check without a time limit gets the remaining time. If that ends it, it counts as not run, not as failed."""
    limits: list[float] = []

    def run(one: Check) -> Outcome:
        limits.append(one.limit_s)
        return Outcome(one.group, one.name, "timed out", "did not end", one.limit_s)

    own, left = run_checks(
        [Check("g", "own", limit_s=5), Check("g", "left")], seconds=100, report=lambda _: None, run=run
    )
    assert limits == [5, pytest.approx(100, abs=5)]
    assert (own.state, left.state, left.seconds) == ("timed out", "not run", limits[1])
    assert "used up" in left.message
