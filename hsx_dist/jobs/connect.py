"""Connect to the Ray cluster of this process."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from hsx_dist.config import public_url
from hsx_dist.errors import ConfigError
from hsx_dist.text import bounded


def connect_ray(run: str = "") -> None:
    """Connect to the cluster at ``RAY_ADDRESS`` (in a submitted job: the job's cluster), or start a local one.

    The job's metadata on Ray's dashboard name the ``run``, if any.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and str(Path.cwd()) not in _searched():
        # A local cluster starts processes with ``python -c``, which would search this folder before installed modules.
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            job_config=_job_config(run),
        )
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise ConfigError(
            f"RAY_ADDRESS: expected a Ray cluster at {public_url(address)!r}, got: "
            f"{bounded(public_url(str(e)))}. Start a cluster, or unset RAY_ADDRESS"
        ) from e


def _searched() -> set[str]:
    """The folders that this process searches for modules."""
    return {str(Path(folder).absolute()) for folder in sys.path}


def _job_config(run: str) -> Any:
    """The job's settings. Workers of the job search no folder for modules that this process does not search.

    Ray lets workers search the driver's working folder before installed packages. It may be a run, whose files must not
    act as code.
    """
    from ray.job_config import JobConfig

    class Config(JobConfig):
        _py_driver_sys_path: list[str]

        def _serialize(self) -> str:
            searched = _searched()
            self._py_driver_sys_path = [path for path in self._py_driver_sys_path if path in searched]
            return super()._serialize()  # type: ignore[no-any-return]

    return Config(metadata={"hsx_run": run} if run else {})
