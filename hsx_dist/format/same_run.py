"""A check that a process on another machine has opened the driver's run, and not another folder of the same path."""

from __future__ import annotations

from hsx_dist.errors import RunMismatch
from hsx_dist.format.runs import read_attempt
from hsx_dist.store import Store


def attempt_token(store: Store, attempt: int) -> str:
    """The random token in the attempt's object; empty without one."""
    return str((read_attempt(store, attempt) or {}).get("token", ""))


def require_same_run(store: Store, attempt: int, token: str) -> None:
    """Check that ``store`` has the attempt of the driver, whose token is ``token``.

    Raises:
        RunMismatch: it has no such attempt, or another driver's.
        StoreError, FormatError: as ``read_attempt``.
    """
    if not token or attempt_token(store, attempt) != token:
        raise RunMismatch(
            f"{store.url}: expected the driver's run, with its attempt {attempt}, got another place of this "
            "name. Mount the driver's folder on this node, or use an object store's URL (s3://…, gs://…)"
        )
