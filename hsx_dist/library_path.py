"""The folders that the dynamic linker searches for shared libraries."""

from __future__ import annotations

import os

_VARIABLE = "LD_LIBRARY_PATH"
#: An entry without files. The variable must not be empty: importing cv2, which vLLM requires, puts a folder and ``:``
#: before it, and the linker takes an empty entry for the working folder, which may be a run.
_NO_FOLDER = "/dev/null"


def search_no_working_folder() -> None:
    """Let processes that this process starts load no libraries from their working folder."""
    entries = [entry for entry in os.environ.get(_VARIABLE, "").replace(";", ":").split(":") if entry]
    os.environ[_VARIABLE] = ":".join(entries or [_NO_FOLDER])
