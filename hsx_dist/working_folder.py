"""Files of the working folder that libraries read. The folder may be a run that another user wrote."""

from __future__ import annotations

import os
import sys

from hsx_dist.errors import ConfigError


def require_no_settings_of(library: str, file: str) -> None:
    """Raise ConfigError if a library that is not imported yet would read ``file`` in the working folder."""
    if library not in sys.modules and os.path.lexists(file):
        raise ConfigError(
            f"expected no {file} in the working folder, got one: {library} would apply it, and it can run programs. "
            "Run the command in another folder"
        )
