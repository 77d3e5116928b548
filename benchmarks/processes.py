"""Find, pin and watch the processes and threads of a benchmark's cell, with little load on the cell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

#: Whether the kernel keeps a list of each thread's children (CONFIG_PROC_CHILDREN).
LISTED = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of ``pid``; empty once ``pid`` has ended.

    Uses the kernel's list of children if available. psutil reads every process of the machine, which takes some
    milliseconds each time. Meanwhile it holds the interpreter's lock, or the core of the writers.
    """
    if not LISTED:
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                children += map(int, (task / "children").read_text().split())
    return children + [below for child in children for below in descendants(child)]


def pin(engine: int, others: int) -> None:
    """Pin this process's first thread to one core, and all other threads and those of child processes to another.

    Never returns: new threads are pinned every half second.
    """
    os.sched_setaffinity(os.getpid(), {engine})
    while True:
        # Also threads that are pinned already: a thread that is starting another one restores its old affinity.
        for process in (os.getpid(), *descendants(os.getpid())):
            for task in tasks(process) - {os.getpid()}:
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(task, {others})
        time.sleep(0.5)


def tasks(process: int) -> set[int]:
    """Ids of the process's threads; empty once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return set(map(int, os.listdir(f"/proc/{process}/task")))  # noqa: PTH208 - cheaper; called every half second
    return set()


def strays(engine: int, others: int) -> set[int]:
    """Threads of this process and its descendants that are not pinned to their core."""
    found = set()
    for process in (os.getpid(), *descendants(os.getpid())):
        for task in tasks(process):
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(task) != {engine if task == os.getpid() else others}:
                    found.add(task)
    return found


def check_pinned(engine: int, others: int) -> None:
    """Check, at a window's end, that all threads are pinned.

    Raises:
        RuntimeError: a thread is not pinned, so the window's figures are invalid.
    """
    if found := strays(engine, others):
        time.sleep(1.5)  # new threads are pinned by then
        if found := found & strays(engine, others):
            raise RuntimeError(
                f"expected threads on cores {engine} and {others} only, got threads {sorted(found)} on other cores"
            )


def cpu_seconds(compute: set[int]) -> dict[str, float]:
    """CPU seconds of this process and its children, by name.

    ``engine``: the threads in ``compute``. Other Python threads are grouped by their name without its number. ``rest``:
    all other threads, including ended ones. ``writer process``: child processes.
    """
    names = {t.native_id: t.name.rstrip("-_0123456789") for t in threading.enumerate()}
    of: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        thread = int(task.name)
        name = "engine" if thread in compute else names.get(thread, "rest")
        of[name] = of.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    of["rest"] = time.process_time() - sum(v for k, v in of.items() if k != "rest")
    for child in descendants(os.getpid()):
        with suppress(psutil.Error):  # it has ended
            times = psutil.Process(child).cpu_times()
            of["writer process"] = of.get("writer process", 0.0) + times.user + times.system
    return of


def memory(pids: Sequence[int]) -> int:
    """Bytes of host memory of these processes. Shared memory, which is their ring, counts once."""
    own, shared = 0, [0]
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        found = dict(line.split(":", 1) for line in lines)
        if "RssAnon" in found:  # a zombie has no such line
            own += int(found["RssAnon"].split()[0]) << 10
            shared.append(int(found["RssShmem"].split()[0]) << 10)
    return own + max(shared)


def growth(seen: Sequence[int]) -> int:
    """Peak of the second half of a window minus peak of the first half: a leak grows in both."""
    half = (len(seen) + 1) // 2
    return max(seen[half:], default=seen[-1]) - max(seen[:half])


#: Smallest number of memory samples from which growth is computed.
_LOOKS = 8


class Watch:
    """Samples, during windows, the host memory of a process and its descendants, and the server's CPU seconds."""

    def __init__(self, pid: int, server: int | None):
        self._pid = pid
        self._server = server
        self._seen: list[tuple[float, int, float]] = []  # (time, bytes, server's CPU seconds)

    @contextmanager
    def looking(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look(self, ended: threading.Event) -> None:
        while True:
            with suppress(psutil.Error):  # a process ended during the sample; the next sample has the others
                pids = (self._pid, *descendants(self._pid))
                self._seen.append((time.monotonic(), memory(pids), self._cpu()))
            if ended.wait(0.25):
                return

    def _cpu(self) -> float:
        if self._server is None:
            return 0.0
        times = [psutil.Process(pid).cpu_times() for pid in (self._server, *descendants(self._server))]
        return sum(t.user + t.system for t in times)

    def within(self, windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Peak memory, memory growth and server's CPU seconds of these windows.

        Raises:
            RuntimeError: a window has no sample.
        """
        seen = [[s for s in self._seen if w["start"] <= s[0] <= w["durable"]] for w in windows]
        # Growth counts only until the last answer: draining afterwards would hide it. It counts only from the time when
        # vLLM's cache is full: before, vLLM touches the cache's memory for the first time.
        loaded = [[m for t, m, _ in self._seen if w["full"] <= t <= w["answered"]] for w in windows]
        for i, w in enumerate(windows):
            if len(loaded[i]) < _LOOKS:
                loaded[i] = [m for t, m, _ in self._seen if w["start"] <= t <= w["answered"]]
        if not all(seen) or not all(loaded):
            raise RuntimeError(f"expected memory samples within each of {len(windows)} windows, got none in one")
        return {
            "memory_peak": max(m for window in seen for _, m, _ in window),
            "memory_growth": max(map(growth, loaded)),
            "server_cpu_s": round(sum(window[-1][2] - window[0][2] for window in seen), 2),
        }
