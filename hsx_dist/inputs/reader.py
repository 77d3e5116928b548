"""Reads an input in a child process: a file that crashes a library or expands to any size ends the child, not the job.

The child runs ``reader_child``. It sends a batch after the last one was taken, so one batch is in flight.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import hsx_dist
from hsx_dist.config import InputConfig, public_url
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.inputs import reader_child
from hsx_dist.inputs.reader_child import memory_limit
from hsx_dist.inputs.records import RecordBatch
from hsx_dist.inputs.sources import InputSource
from hsx_dist.text import bounded

#: Each thread's stack counts as memory, and Arrow's other pools and threads reserve more than they use.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
#: Seconds that a child may take to end after its connection closed.
_END_S = 5.0
#: Limit of the shown characters of a dead child's last line on standard error.
_LONGEST_LINE = 200


def read_in_child(
    config: InputConfig, sources: tuple[InputSource, ...] | None, columns: Sequence[str], needed: Sequence[str]
) -> Iterator[RecordBatch]:
    """Yield the batches of ``read_batches``, from a child process.

    The child ends with the iterator, or with this process.

    Args:
        sources: the sources that ``find_input`` found; None: the child finds them.

    Raises:
        FormatError, Unavailable, ConfigError: as ``find_input`` and ``read_batches``; FormatError also if the child
            dies.
    """
    request = _pickled(config, (config, sources, list(columns), list(needed)))
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as errors:
        with theirs:
            process = _start(theirs, errors)
        shown, last = public_url(config.path), -1
        try:
            while True:
                try:
                    if request:
                        ours.send_bytes(request)
                        request = b""
                    answer = pickle.loads(ours.recv_bytes())  # noqa: S301 (of the child, which runs only this package)
                except (EOFError, OSError):
                    raise _died(process, errors, shown, last, config) from None
                if answer is None:
                    return
                if isinstance(answer, Exception):
                    raise answer
                shown = answer.shown
                last = answer.records[-1][0] if answer.records else last
                yield answer
        finally:
            process.kill()
            process.wait()


def _pickled(config: InputConfig, request: Any) -> bytes:
    for name, value in config.storage_options.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 (each type has its own; its text may hold the value)
            shown = hide_secrets(name)
            raise ConfigError(
                f"input.storage_options.{shown}: expected a value that can be pickled for another process, got "
                f"{type(value).__name__}. Use texts, numbers, lists and mappings"
            ) from None
    return pickle.dumps(request)


def _start(connection: Connection, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # The package may be found only by this process's search path. -P: no module is taken from the working folder.
    place = str(Path(hsx_dist.__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {place!r}); from {reader_child.__name__} import main; main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", start, str(connection.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[connection.fileno()],
        env={**os.environ, **_ENVIRONMENT},
    )


def _died(
    process: subprocess.Popen[bytes], errors: IO[bytes], shown: str, last: int, config: InputConfig
) -> FormatError:
    try:
        code = process.wait(_END_S)
        ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    except subprocess.TimeoutExpired:
        ended = "closing its connection"
    size = errors.seek(0, 2)
    errors.seek(max(size - 4096, 0))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    # A URL may be signed.
    said = f" ({bounded(lines[-1], _LONGEST_LINE)})" if lines and "://" not in lines[-1] else ""
    limit = f"{memory_limit(config) / 2**30:.1f} GiB"
    return FormatError(
        f"{shown}, after row {last}: expected to read it within {limit} of memory, got a reader process that ended by "
        f"{ended}{said}. If its memory ran out, raise input.max_row_bytes. Otherwise write the file again"
    )
