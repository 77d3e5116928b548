"""Processes beside what is measured, looked for without taking much from it."""

from __future__ import annotations

import os
from contextlib import suppress
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
