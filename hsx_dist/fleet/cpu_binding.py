"""The cores that a CPU engine binds to. By default two engines on one machine bind to the same cores."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.store.folders import close, close_lock, open_own, private_folder

log = get_logger(__name__)


class CoreClaim:
    """Cores of this machine that no other process of this package claims. The claim ends with the process."""

    def __init__(self, count: int):
        """Claim up to ``count`` of the cores that this process may run on, and list them in ``cores``.

        If the folder of the claims cannot be used, claims none, and logs why. Any user can create a folder of that
        name.
        """
        self.cores: list[int] = []
        self._files: list[int] = []
        try:
            self._claim(count)
        except (ConfigError, OSError) as e:
            self.release()
            self.cores = []
            warn_once(f"{type(e).__name__}: {e}")

    def _claim(self, count: int) -> None:
        folder = private_folder(Path(tempfile.gettempdir()) / f"hsx-cores-{os.geteuid()}")
        try:
            for core in sorted(os.sched_getaffinity(0)):
                if len(self.cores) == count:
                    break
                self._files.append(open_own(folder, str(core), os.O_CREAT | os.O_RDWR))
                try:
                    fcntl.flock(self._files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    close(self._files.pop())
                else:
                    self.cores.append(core)
        finally:
            close(folder)

    def release(self) -> None:
        for fd in self._files:
            close_lock(fd)
        self._files.clear()


@cache
def warn_once(why: str) -> None:
    log.warning("no cores are reserved for engines of this process, engines of one machine may share cores: %s", why)


def omp_binding(cores: list[int], ranks: int, wanted: int) -> str:
    """``VLLM_CPU_OMP_THREADS_BIND`` for an engine of ``ranks`` workers: a list of cores for each rank, joined by ``|``.

    Returns ``nobind`` if fewer than ``wanted`` cores are free: the kernel's choice is better than sharing a core."""
    if len(cores) < max(wanted, ranks):
        log.warning("engine threads are not bound to cores: free=%d wanted=%d", len(cores), max(wanted, ranks))
        return "nobind"
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


def prepare_cpu(ranks: int, num_cpus: float) -> CoreClaim | None:
    """Bind the engine to unclaimed cores, on a machine without an accelerator."""
    import torch

    if torch.cuda.is_available() or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return None
    claim = CoreClaim(max(int(num_cpus), 1))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = omp_binding(claim.cores, ranks, max(int(num_cpus), 1))
    return claim
