"""Processes beside what is measured, looked for without taking much from it."""

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
    """Process ids of what ``pid`` started, and what that started; of one that has ended, none.

    By the kernel's own list where it keeps one: psutil reads every process of the machine, some milliseconds each time,
    in which its interpreter's lock, or the core that it shares with the writers, is not the engine's.
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
    """Keep this process's first thread on one core, and every other one, also those that come later and those of the
    processes that it starts, on another."""
    os.sched_setaffinity(os.getpid(), {engine})
    while True:
        # Those that are pinned already, too: one that was just starting another one gives itself its old cores back.
        for process in (os.getpid(), *descendants(os.getpid())):
            for task in tasks(process) - {os.getpid()}:
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(task, {others})
        time.sleep(0.5)


def tasks(process: int) -> set[int]:
    """Its threads' ids; none once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return set(map(int, os.listdir(f"/proc/{process}/task")))  # noqa: PTH208 - every half second, beside the engine
    return set()


def strays(engine: int, others: int) -> set[int]:
    """Threads of this process and of those that it started that may run elsewhere."""
    found = set()
    for process in (os.getpid(), *descendants(os.getpid())):
        for task in tasks(process):
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(task) != {engine if task == os.getpid() else others}:
                    found.add(task)
    return found


def check_pinned(engine: int, others: int) -> None:
    """At a window's end.

    Raises:
        RuntimeError: a thread runs elsewhere, so that the window is not what it claims.
    """
    if found := strays(engine, others):
        time.sleep(1.5)  # those that just began are pinned by then
        if found := found & strays(engine, others):
            raise RuntimeError(f"expected threads on cores {engine} and {others} alone, {sorted(found)} are not")


def cpu_seconds(compute: set[int]) -> dict[str, float]:
    """CPU seconds of this process: the threads in ``compute``, each of Python's other ones by its name without its
    number, and the rest, among it threads that have ended."""
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
    """Bytes of host memory that these processes have for themselves, and of what they share, their ring, once; those
    that have ended have none."""
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
    """The second half's peak over the first half's, of one window: what grows goes on growing."""
    half = (len(seen) + 1) // 2
    return max(seen[half:], default=seen[-1]) - max(seen[:half])


#: Fewer looks at memory than this say nothing of growth.
_LOOKS = 8


class Watch:
    """Host memory of a process and those that it started, and the CPU seconds of the server beside it, from outside and
    while a window lasts."""

    def __init__(self, pid: int, server: int | None):
        self._pid = pid
        self._server = server
        self._seen: list[tuple[float, int, float]] = []  # (when, bytes, server's CPU seconds)

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
            with suppress(psutil.Error):  # one that ended meanwhile; the next look has the others
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
        """Of these times alone, in order.

        Raises:
            RuntimeError: nothing was seen of one of them.
        """
        seen = [[s for s in self._seen if w["start"] <= s[0] <= w["durable"]] for w in windows]
        # Under load alone: what drains afterwards would hide what grows.
        # Nor before the cache is as full as it becomes: its memory is vLLM's, touched for the first time.
        loaded = [[m for t, m, _ in self._seen if w["full"] <= t <= w["answered"]] for w in windows]
        for i, w in enumerate(windows):
            if len(loaded[i]) < _LOOKS:
                loaded[i] = [m for t, m, _ in self._seen if w["start"] <= t <= w["answered"]]
        if not all(seen) or not all(loaded):
            raise RuntimeError(f"expected looks at memory within each of {len(windows)} windows, there were none")
        return {
            "memory_peak": max(m for window in seen for _, m, _ in window),
            "memory_growth": max(map(growth, loaded)),
            "server_cpu_s": round(sum(window[-1][2] - window[0][2] for window in seen), 2),
        }
