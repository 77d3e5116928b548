"""Child processes of tests and demos: free ports, a log, a bounded wait, and an end by process id."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class StartFailed(RuntimeError):
    """A server did not come up; the message has the end of its log."""


def free_ports(n: int, *, twin: int = 0) -> list[int]:
    """``n`` different TCP ports on which nothing listens now, outside the range that outgoing connections use.

    With ``twin``, each port plus ``twin`` is free too.
    """
    found: list[int] = []
    for port in random.sample(range(10100, 20000), k=4000):
        if _is_free(port) and (not twin or _is_free(port + twin)):
            found.append(port)
        if len(found) == n:
            return found
    raise StartFailed(f"expected {n} free ports in 10100-20000, found {len(found)}; end what listens there")


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def program(name: str) -> str:
    """The path of an executable, the running interpreter's own environment first."""
    here = Path(sys.executable).with_name(name)
    path = str(here) if here.exists() else shutil.which(name)
    if path is None:
        raise StartFailed(f"expected the program {name!r} beside {sys.executable} or on PATH; install hsx-dist[dev]")
    return path


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
        """Ask the process to end, and end its group when it has not after ``patience`` seconds."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.kill()

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
def child(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Run ``argv`` in a process group of its own, both outputs into ``log``; its group is gone at the end."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    running = Child(process, log)
    try:
        yield running
    finally:
        running.kill()
