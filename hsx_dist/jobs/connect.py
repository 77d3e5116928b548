"""Connect to the Ray cluster of this process."""

from __future__ import annotations

import logging
import os

from hsx_dist.config import public_url
from hsx_dist.errors import ConfigError


def connect_ray(run: str = "") -> None:
    """Connect to the cluster at ``RAY_ADDRESS`` (in a submitted job: the job's cluster), or start a local one.

    The job's metadata on Ray's dashboard name the ``run``, if any.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.WARNING,
            job_config=ray.job_config.JobConfig(metadata={"hsx_run": run} if run else {}),
        )
    except ConnectionError as e:
        raise ConfigError(
            f"RAY_ADDRESS: expected a Ray cluster at {public_url(address or 'local')!r}, got: "
            f"{public_url(str(e))}. Start a cluster, or unset RAY_ADDRESS"
        ) from e
