"""Which code puts a plane of high bytes onto a plane of low ones while it decodes it: libzstd's, or compiled for both.

The compiled one (``huffman``) needs numba, and a second to start: a process that has decoded ``WORTH_BYTES`` has read
enough to make up for that. ``HSX_COMPILED_DECODE`` may be ``never``, or ``always``: from the first chunk on.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.format.codecs.zstd import walk
from hsx_dist.logger import get_logger

log = get_logger(__name__)

VARIABLE = "HSX_COMPILED_DECODE"
#: numba reads it in the working folder, which may be a downloaded run. It can name a cache, which numba unpickles.
NUMBA_SETTINGS = ".numba_config.yaml"
#: Starting takes a second, where somebody has compiled it before; a GiB is decoded in 0.2 s less.
WORTH_BYTES = 4 << 30
#: A chunk of fewer values is not worth the tables.
_LEAST = 32 << 10

Join = Callable[[np.ndarray[Any, Any], int, int, np.ndarray[Any, Any], np.ndarray[Any, Any], int, int], bool]


class Planes:
    """What one process has decoded, and by what it goes on."""

    def __init__(self, worth_bytes: float):
        """``worth_bytes``: so many are decoded by libzstd first."""
        self._left = worth_bytes
        self._join: Join | None = None
        self._starting = threading.Lock()

    @classmethod
    def chosen(cls) -> Planes:
        """As the environment says.

        Raises:
            ConfigError: something else than ``auto``, ``always`` or ``never``.
        """
        said = os.environ.get(VARIABLE) or "auto"
        worth = {"auto": WORTH_BYTES, "always": 0, "never": math.inf}.get(said)
        if worth is None:
            raise ConfigError(f"{VARIABLE}: expected auto, always or never, came {said!r}; correct it")
        return cls(worth)

    def join(self, frame: memoryview, low: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
        """Fill ``out``, uint16 ``[n, H]`` whose rows may lie apart, with ``low``, uint8 of that shape, and above it
        what ``frame`` holds; whether it was done. If not, ``out`` means nothing, and libzstd is to decode ``frame``.

        Raises:
            FormatError: ``frame`` is not one whole zstd frame of as many bytes.
        """
        join = self._join or self._due(out.nbytes)
        rows, width = out.shape
        pitch = out.strides[0] // 2
        if join is None or out.size < _LEAST or out.strides[1] != 2 or out.strides[0] != 2 * pitch or pitch < width:
            return False
        if pitch == width:
            span = out.reshape(-1)
        else:
            span = np.lib.stride_tricks.as_strided(out, ((rows - 1) * pitch + width,), (2,))
        at, largest = walk(frame, out.size)
        return join(np.frombuffer(frame, np.uint8), at, largest, low.reshape(-1), span, width, pitch)

    def _due(self, nbytes: int) -> Join | None:
        """The compiled code, once it is worth it. One thread starts it; the others go on without."""
        self._left -= nbytes
        if self._left >= 0 or not self._starting.acquire(blocking=False):
            return None
        # Kept for good: it is found now, or not to be had.
        if os.path.lexists(NUMBA_SETTINGS):
            log.warning(
                "codec split is decoded by libzstd alone: expected no %s in the working folder, got one: numba would "
                "load the code that it names. Work in another folder than the run's",
                NUMBA_SETTINGS,
            )
            return None
        try:
            self._join = importlib.import_module("hsx_dist.format.codecs.huffman").join_planes
        except ImportError as e:
            log.debug("codec split is decoded by libzstd alone (%s); hsx-dist[fast] has what is faster", e)
        except Exception as e:  # noqa: BLE001 - whatever keeps numba from compiling, libzstd can do it
            log.warning("codec split is decoded by libzstd alone: numba: %s: %s", type(e).__name__, e)
        return self._join


#: This process's; None until something is decoded.
current: Planes | None = None


def join(frame: memoryview, low: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
    """``Planes.join``, by ``current``."""
    global current
    if current is None:
        current = Planes.chosen()
    return current.join(frame, low, out)
