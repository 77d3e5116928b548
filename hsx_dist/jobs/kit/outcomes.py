"""Checks in child processes. A check has passed only if its process wrote this result, and then ended with status 0."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hsx_dist.config.redaction import redact_text
from hsx_dist.jobs.kit.process import child

OutcomeState = Literal["passed", "failed", "crashed", "timed out", "not run"]
#: Results that a check's process may write.
_Claim = Literal["passed", "failed", "not run"]

#: Name of the variable with the file for a check's result.
RESULT = "HSX_KIT_RESULT"
#: Characters of a log that a message shows.
_TAIL = 1500
#: The line of an exception in a log.
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception)\b: .*")


@dataclass(frozen=True, slots=True)
class Check:
    """A planned check. ``argv``: its program; ``cannot``: why it cannot run on this machine."""

    group: str
    name: str
    argv: tuple[str, ...] = ()
    limit_s: float = 240.0
    env: Mapping[str, str] = field(default_factory=dict)
    cannot: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check. ``message``: redacted; ``figures``: measured numbers, JSON types."""

    group: str
    name: str
    state: OutcomeState
    message: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact_text(self.message))

    @property
    def bad(self) -> bool:
        return self.state in ("failed", "crashed", "timed out")


def claim(state: _Claim, message: str, figures: Mapping[str, Any] | None = None) -> None:
    """In a check's process: write its result."""
    body = {"state": state, "message": message, "figures": dict(figures or {})}
    Path(os.environ[RESULT]).write_text(json.dumps(body))


def run_check(check: Check) -> Outcome:
    """Run the check's process, and end all processes that it started."""
    if check.cannot:
        return Outcome(check.group, check.name, "not run", check.cannot)
    with tempfile.TemporaryDirectory(prefix="hsx-kit-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        began = time.monotonic()
        with child(check.argv, log=log, env={**check.env, RESULT: str(result)}) as running:
            try:
                status = running.process.wait(check.limit_s)
            except subprocess.TimeoutExpired:
                # Also the workers, which have other process groups.
                running.terminate(0)
                status = None
        seconds = time.monotonic() - began
        state, message, figures = _judge(status, result, log, check.limit_s)
    return Outcome(check.group, check.name, state, message, seconds, figures)


def _judge(status: int | None, result: Path, log: Path, limit_s: float) -> tuple[OutcomeState, str, dict[str, Any]]:
    # Redacted before the cut, because half of a URL is not recognized as one.
    text = redact_text(log.read_text(errors="replace"))
    tail = text[-_TAIL:].strip()
    if (first := _ERROR.search(text)) and first[0] not in tail:
        # vLLM's own process logs the cause first. Its parent's traceback, which follows, does not have it.
        tail = f"{tail}\nits first error: {first[0][:_TAIL]}"
    if status is None:
        return "timed out", f"did not end within {limit_s:.0f} s; its log ends:\n{tail}", {}
    if status != 0:
        how = signal.Signals(-status).name if -status in list(signal.Signals) else f"status {status}"
        return "crashed", f"ended with {how}; its log ends:\n{tail}", {}
    try:
        found = json.loads(result.read_text())
        state, message, figures = found["state"], str(found["message"]), dict(found["figures"])
        if state not in get_args(_Claim):
            raise ValueError(state)
    except (OSError, ValueError, KeyError, TypeError) as e:
        return "crashed", f"ended without a result ({type(e).__name__}); its log ends:\n{tail}", {}
    return state, message, figures


def python(*arguments: str) -> tuple[str, ...]:
    """A program of this interpreter. It finds no modules in the working folder (-P)."""
    return (sys.executable, "-P", *arguments)
