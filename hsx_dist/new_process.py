"""Rules of every process of this package: which libraries it loads, and what its log shows."""

from __future__ import annotations

import os

from hsx_dist.observe.logs import redact_records

#: The folders that the dynamic linker searches for shared libraries.
_VARIABLE = "LD_LIBRARY_PATH"
#: An entry without files. The variable must not be empty: importing cv2, which vLLM requires, puts a folder and ``:``
#: before it, and the linker takes an empty entry for the working folder, which may be a run.
_NO_FOLDER = "/dev/null"


def begin_process() -> None:
    """Apply the rules to this process. Every entry point calls this function first. It may be called again."""
    _search_no_working_folder()
    redact_records()


def _search_no_working_folder() -> None:
    """Let processes that this process starts load no libraries from their working folder."""
    entries = [entry for entry in os.environ.get(_VARIABLE, "").replace(";", ":").split(":") if entry]
    os.environ[_VARIABLE] = ":".join(entries or [_NO_FOLDER])
