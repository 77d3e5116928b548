"""``hsx doctor``: check whether a run can work here. Prints a line per check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hsx_dist.cli.exit_codes import FINE, FOUND_BAD
from hsx_dist.config import load_config, resolve_paths
from hsx_dist.errors import ConfigError
from hsx_dist.observe.console import print_json, say, say_lines

if TYPE_CHECKING:
    from hsx_dist.jobs.diagnosis import Diagnosis

_SHOWN = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def run_doctor(
    config: str | None, overrides: Sequence[str], *, engine: bool, as_json: bool, report: Path | None = None
) -> int:
    """Print each check as soon as it ends. Return the exit status: 1 if a check failed."""
    from hsx_dist.jobs.doctor import examine

    given = config is not None or bool(overrides)
    if report is not None and (given or not engine):
        raise ConfigError(
            "--report: expected it with --engine and without settings, got another combination. "
            "Run hsx doctor --engine --report FOLDER"
        )
    if engine and not given:
        from hsx_dist.jobs.kit.machine import examine_machine

        return _print_checks(examine_machine(report), as_json)
    settings = resolve_paths(load_config(config, overrides), Path.cwd()) if given else None
    return _print_checks(examine(settings, engine=engine), as_json)


def _print_checks(checks: Iterable[Diagnosis], as_json: bool) -> int:
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            say_lines(f"{_SHOWN[check.state]}  {check.name}: {check.message}")
    failed = sum(check.state == "fail" for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in found]})
    elif failed:
        say(f"{failed} of {len(found)} checks failed")
    return FOUND_BAD if failed else FINE
