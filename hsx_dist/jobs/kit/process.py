"""Child processes: a log, a bounded wait, and an end by process id, with all that the process started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class StartFailed(RuntimeError):
    """A server did not come up; the message has the end of its log."""


@dataclass
class Child:
    """A running child process, the leader of its own process group."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End the whole process group at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self, patience: float) -> None:
        """Ask the process to end; after ``patience`` seconds at most it is gone, with all that it started."""
        started = _descendants(self.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.kill()
        for pid, born in started.items():  # those in groups of their own; the birth tells a process id used again
            if _stat(pid)[1] == born:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Poll ``ready`` until it is true. ``StartFailed`` when the process ends or ``seconds`` are over before."""
        end = time.monotonic() + seconds
        while not ready():
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with status {code}" if code is not None else f"was not ready after {seconds:.0f} s"
                tail = self.log.read_text(errors="replace")[-3000:]
                raise StartFailed(f"{self.process.args!r} {what}; its log ends:\n{tail}")
            time.sleep(0.05)


@contextmanager
def child(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None, pass_fds: Collection[int] = ()
) -> Iterator[Child]:
    """Run ``argv`` in a process group of its own, both outputs into ``log``; its group is gone at the end.

    ``env`` goes over this process's environment; None takes a variable away. ``pass_fds``: as ``subprocess.Popen``'s.
    """
    variables = {**os.environ, **(env or {})}
    with log.open("ab") as out:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in variables.items() if v is not None},
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    running = Child(process, log)
    try:
        yield running
    finally:
        running.kill()


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this program as Ctrl-C does, so that the servers that it started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _descendants(pid: int) -> dict[int, str]:
    """Process ids of all that ``pid`` started, and that those started, each with its time of birth."""
    found = {int(p.name): _stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    below: dict[int, str] = {}
    parents = {str(pid)}
    while parents:
        new = {p: born for p, (parent, born) in found.items() if parent in parents}
        below.update(new)
        parents = {str(p) for p in new}
    return below


def _stat(pid: int) -> tuple[str, str]:
    """Parent and time of birth of a process; empty strings when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[1], fields[19]
