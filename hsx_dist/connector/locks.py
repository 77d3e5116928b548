"""Companion locks, as vLLM's own connector has them: ``PATH.lock`` is held exclusively until the object is there.

Its ``load_hidden_states`` takes the lock shared, and so sleeps until the writer is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path


class CompanionLocks:
    """The locks of one worker on objects under ``folder``. Thread-safe."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._held: dict[str, tuple[int, int]] = {}  # name → (file descriptor, how many hold it)
        self._mutex = threading.Lock()

    def hold(self, name: str) -> None:
        """Make the lock file and hold it; again for each request of the same name.

        Raises:
            OSError: the file cannot be made.
        """
        with self._mutex:
            fd, count = self._held.get(name, (-1, 0))
            if count == 0:
                path = self._path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
                # Another process may be writing this very object. A step never waits: its reader then waits for them.
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held[name] = (fd, count + 1)

    def release(self, name: str, *, stored: bool) -> None:
        """One holder less; the last one opens the lock. Where nothing was stored the lock file goes too."""
        with self._mutex:
            if name not in self._held:
                return
            fd, count = self._held.pop(name)
            if count > 1:
                self._held[name] = (fd, count - 1)
                return
            if not stored and not (self._folder / name).exists():
                self._path(name).unlink(missing_ok=True)
            os.close(fd)

    def release_all(self) -> None:
        """At the end: nobody waits for a process that is gone."""
        with self._mutex:
            for fd, _ in self._held.values():
                os.close(fd)
            self._held.clear()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"
