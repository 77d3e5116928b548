"""The errors of hsx_dist, grouped by what a handler would do about them.

``ConfigError`` and ``InputError`` are the user's to mend; ``StoreError`` is the store's (``retryable`` says whether to
try again); ``FormatError`` means that stored bytes are not what they must be; ``RunError`` is about a run's state;
``EngineError`` is vLLM's side. Every one of them pickles: Ray carries them between processes.
"""

from __future__ import annotations

from typing import ClassVar


class HsxError(Exception):
    """Base of all errors that hsx_dist raises on purpose."""


class ConfigError(HsxError, ValueError):
    """A setting is wrong; nothing was started. Correct it and run again."""


class InputError(HsxError, ValueError):
    """One input row cannot be used. The row is refused with this reason; the others go on."""


class StoreError(HsxError, OSError):
    """An object store said no. ``retryable`` tells whether the same call may go through later."""

    retryable: ClassVar[bool] = False


class NotFound(StoreError):
    """There is no such object (or bucket)."""


class AlreadyExists(StoreError):
    """A put-if-absent met an object of that name."""


class Denied(StoreError):
    """The credentials are missing, wrong, or not allowed to do this."""


class Unavailable(StoreError):
    """Time-out, connection loss, throttling or a server error."""

    retryable: ClassVar[bool] = True


class FormatError(HsxError, ValueError):
    """A stored object is not what the format says it must be."""


class UnknownCodec(FormatError):
    """The object was written with a codec that is not registered here."""


class IntegrityError(FormatError):
    """A checksum does not match: the bytes changed after they were written."""


class RunError(HsxError, RuntimeError):
    """A run is not in a state in which the call makes sense."""


class RunMismatch(RunError):
    """The run is not the one that was meant: it was made with settings that would give its samples another meaning, or
    it is another run than the one that a state was taken from."""


class Fenced(RunError):
    """A newer attempt owns the run: this one must stop and write nothing more."""


class SampleNotFound(RunError, KeyError):
    """The run has no durable sample of that key."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class SampleConsumed(RunError):
    """The sample was stored, and removed once every consumer had used it."""


class RunStalled(RunError):
    """The run is not complete, and nobody is at work on it: no sample will come until it is started again."""


class SampleFailed(RunError):
    """The producer left a failure marker for the key: waiting longer is of no use."""


class SampleConflict(RunError):
    """The key stands for another sample already: other tokens, layers or model."""


class EngineError(HsxError, RuntimeError):
    """vLLM could not be started, or died."""
