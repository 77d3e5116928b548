"""The process that reads an input for ``reader``. It has limited memory and no registered Arrow types."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError, HsxError
from hsx_dist.inputs.arrow_files import unregister_extension_types
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.records import RecordBatch, read_batches
from hsx_dist.inputs.sources import found_again
from hsx_dist.inputs.tables import Unreadable
from hsx_dist.new_process import begin_process

#: Memory of the process: an Arrow record batch as it is stored and as it is decoded, of 2 GiB each.
READER_BYTES = 4 << 30
#: Seconds between two checks whether the parent is alive.
_LOOK_S = 1.0
#: The largest row is in memory as a decoded table, as Python objects (12 times its bytes) and as a message.
_ROW_FACTOR = 32


def memory_limit(config: InputConfig) -> int:
    """Return the number of bytes that the process may allocate."""
    return READER_BYTES + _ROW_FACTOR * int(config.max_row_bytes)


def main() -> None:
    begin_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may continue to read
    connection = Connection(int(sys.argv[1]))
    config, sources, columns, needed = pickle.loads(connection.recv_bytes())  # noqa: S301 (the parent's)
    threading.Thread(target=_end_with_parent, args=(connection, int(sys.argv[2])), daemon=True).start()
    _limit_memory(memory_limit(config))
    answer: HsxError | None = None
    try:
        found = find_input(config) if sources is None else found_again(config, sources)
        if any(source.format in ("parquet", "arrow") for source in found.sources):
            with suppress(ImportError):
                unregister_extension_types()
        for batch in read_batches(found, columns, needed):
            connection.send_bytes(_pickled(batch))
    except HsxError as e:
        answer = e
    except MemoryError:
        sys.exit("MemoryError")
    except Exception as e:  # noqa: BLE001 (a library's error for a broken file; its text may hold a signed URL)
        answer = FormatError(f"expected an input that can be read, got {type(e).__name__}. Check the file")
    connection.send_bytes(pickle.dumps(answer))


def _pickled(batch: RecordBatch) -> bytes:
    try:
        return pickle.dumps(batch)
    except MemoryError:
        raise  # not the row's fault
    except Exception:  # noqa: BLE001 (each type has its own)
        return pickle.dumps(batch._replace(records=[(number, _sendable(item)) for number, item in batch.records]))


def _sendable(item: object) -> object:
    try:
        pickle.dumps(item)
    except MemoryError:
        raise  # not the row's fault
    except Exception as e:  # noqa: BLE001 (as above)
        return Unreadable(f"the row's values cannot be read ({type(e).__name__}). Correct or cast the column")
    return item


def _end_with_parent(connection: Connection, parent: int) -> None:
    """End this process when the parent closes the connection or dies, also while a store does not answer.

    Checks the parent's process id too, because a process that the parent forked keeps the connection open after the
    parent's death.
    """
    with suppress(EOFError, OSError):
        while os.getppid() == parent and not connection.poll(_LOOK_S):
            pass
    os._exit(1)


def _limit_memory(more: int) -> None:
    """Let this process allocate ``more`` bytes. macOS has no such limit."""
    if sys.platform != "linux":
        return
    import resource

    with suppress(OSError):  # the kernel then kills this process first if the machine runs out of memory
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [1024 * int(used[1] if used else 0) + more, *(x for x in (soft, hard) if x != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
