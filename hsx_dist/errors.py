"""The errors of hsx_dist, grouped by how a caller handles them.

- ``ConfigError`` and ``InputError``: the user must correct a setting or an input row.
- ``StoreError``: the store failed. ``retryable``: the same call may succeed later.
- ``FormatError``: stored bytes are wrong.
- ``RunError``: a run's state does not allow the call.
- ``EngineError``: vLLM failed.

All errors can be pickled, since Ray passes them between processes.

Example:
    >>> try:
    ...     load_hidden_states("runs/demo", "absent", wait=0.01)
    ... except SampleNotFound as error:
    ...     print(str(error).partition(": ")[2])
    expected a sample 'absent', got none: the run is complete with 3 samples. List their keys with Run.keys or hsx ls
"""

from __future__ import annotations

from typing import ClassVar


def install_extra(name: str) -> str:
    """An error's advice to install an extra of this package, which is not on a package index."""
    return f'Run pip install ".[{name}]" in a checkout of hsx_dist'


def is_error(error: BaseException) -> bool:
    """Whether a call failed: an ``Exception``, or a panic in a library's Rust code.

    A panic's class is no ``Exception``. Each library has its own class of that name, and none can be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class HsxError(Exception):
    """Base of all errors that hsx_dist raises on purpose."""


class ConfigError(HsxError, ValueError):
    """A setting is wrong; nothing was started. Correct it and run again."""


class InputError(HsxError, ValueError):
    """One input row cannot be used. The row is refused with this reason; other rows are still computed."""


class StoreError(HsxError, OSError):
    """An object store's call failed. ``retryable``: the same call may succeed later."""

    retryable: ClassVar[bool] = False


class NotFound(StoreError):
    """There is no such object (or bucket)."""


class AlreadyExists(StoreError):
    """A conditional put found an existing or changed object of that name."""


class Denied(StoreError):
    """The credentials are missing, wrong, or not allowed to do this."""


class ObjectsMissing(StoreError):
    """The store lacks objects that the run's processes have stored, or a listing lacks them."""


class Unavailable(StoreError):
    """Time-out, connection loss, throttling or a server error."""

    retryable: ClassVar[bool] = True


class FormatError(HsxError, ValueError):
    """A stored object violates the format."""


class UnknownCodec(FormatError):
    """The object was written with a codec that is not registered here."""


class IntegrityError(FormatError):
    """A checksum does not match: the bytes changed after they were written."""


class RunError(HsxError, RuntimeError):
    """The run's state does not allow the call."""


class RunMismatch(RunError):
    """The run is not the expected run.

    For example, the stored run has other settings or another input, or a saved state belongs to another run.
    """


class Fenced(RunError):
    """A newer attempt owns the run: this attempt must stop writing."""


class SampleNotFound(RunError, KeyError):
    """The run has no durable sample of that key."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class SampleConsumed(RunError):
    """The sample was removed after every consumer had used it."""


class RunStalled(RunError):
    """The run is incomplete and no driver is running: no samples will be stored until the run is resumed."""


class SampleFailed(RunError):
    """The producer stored a failure marker for the key: no sample will follow."""


class SampleExpired(RunError):
    """The key's stored object has expired, or soon will, and cannot be renewed."""


class SampleConflict(RunError):
    """The key belongs to another sample: other tokens, layers or model."""


class EngineError(HsxError, RuntimeError):
    """vLLM could not be started, or died."""
