"""Processes beside what is measured, looked for without taking much from it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def descendants(pid: int) -> list[int]:
    """Process ids of what ``pid`` started, and what that started; of one that has ended, none.

    The kernel's own list where it keeps one: psutil reads every process of the machine, 3 ms each time, in which its
    interpreter's lock, or the core that it shares with the writers, is not the engine's.
    """
    found: list[int] = []
    new = [pid]
    while new:
        children: list[int] = []
        for process in new:
            tasks = Path(f"/proc/{process}/task")
            with suppress(OSError):
                for task in tasks.iterdir():
                    if not (listed := task / "children").exists() and task.exists():
                        with suppress(psutil.Error):  # a kernel without CONFIG_PROC_CHILDREN
                            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
                        return []
                    with suppress(OSError):  # the thread has ended
                        children += map(int, listed.read_text().split())
        found += children
        new = children
    return found
