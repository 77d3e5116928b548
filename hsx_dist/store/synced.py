"""Which folders' names are synced, so that a put syncs each name once and not once an object."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class SyncedFolders:
    """Folders whose names this process synced: at most ``most`` of them. Thread-safe.

    An inode alone does not identify a folder: a file system gives the inode of a removed folder to the next one, which
    another process may make and never sync. Each folder is therefore kept open, as no inode of an open folder is given
    away. (An NFS server may do so. It stores a new folder's name before it answers.) A folder beyond ``most``, the
    least recently used, is closed and synced again: one ``fsync`` more for its next object.
    """

    def __init__(self, most: int = 64):
        self._most = most
        self._kept: OrderedDict[tuple[Hashable, int, int], int] = OrderedDict()  # where, device and inode → descriptor
        self._mutex = threading.Lock()

    def once(self, where: Hashable, folder: int, sync: Callable[[], None]) -> None:
        """Call ``sync``, unless it returned before for the open ``folder`` at ``where``."""
        found = os.fstat(folder)
        key = (where, found.st_dev, found.st_ino)
        with self._mutex:
            if key in self._kept:
                self._kept.move_to_end(key)
                return
        sync()
        try:
            kept = os.dup(folder)
        except OSError:  # this process has no descriptor to spare: the next put syncs the name again
            return
        with self._mutex:
            if key in self._kept:  # another thread was quicker
                os.close(kept)
                return
            self._kept[key] = kept
            if len(self._kept) > self._most:
                os.close(self._kept.popitem(last=False)[1])

    def close(self) -> None:
        """Close all folders: a file system cannot be unmounted while this process keeps one of its folders open."""
        with self._mutex:
            while self._kept:
                os.close(self._kept.popitem()[1])
