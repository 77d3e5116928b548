"""Child processes with a log, a bounded wait, and an end by process id that includes their descendants."""

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

from hsx_dist.text import redacted


class StartFailed(RuntimeError):
    """A server did not start. The message has the end of its log."""


@dataclass
class Child:
    """A running child process. It leads a process group."""

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
        """Send SIGTERM, then after ``patience`` seconds SIGKILL, also to all processes that it started."""
        started = _descendants(self.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.kill()
        for pid, born in started.items():  # in other process groups; the time of birth detects a reused process id
            if _stat(pid)[1] == born:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Poll ``ready`` until it is true. Raises ``StartFailed`` if the process ends before, or after ``seconds``."""
        end = time.monotonic() + seconds
        while not ready():
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with status {code}" if code is not None else f"was not ready after {seconds:.0f} s"
                tail = redacted(self.log.read_text(errors="replace"))[-3000:]
                raise StartFailed(f"{self.process.args!r} {what}; its log ends:\n{tail}")
            time.sleep(0.05)


@contextmanager
def child(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None, pass_fds: Collection[int] = ()
) -> Iterator[Child]:
    """Run ``argv`` in a new process group, with both outputs in ``log``. At the end the whole group is killed.

    ``env``: changes to this process's environment; None removes a variable. ``pass_fds``: as in ``subprocess.Popen``.
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
    """Process ids of all descendants of ``pid``, each with its time of birth."""
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
