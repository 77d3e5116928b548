"""A writer process that stops itself (SIGSTOP) before one call to the store. Arguments: place, verb, part of the name.

It stores sample ``b`` in attempt 1, and prints the result.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from hsx_dist.errors import HsxError
from hsx_dist.format.place import Place, open_place
from hsx_dist.store.local import LocalStore
from tests.unit.protocol.scenarios import Writer


class Pausing(LocalStore):
    """Stops the process before the first call of ``verb`` for a name that has ``part``."""

    verb, part = "", ""

    def _pause(self, verb: str, name: str) -> None:
        if self.verb == verb and self.part in name:
            self.verb = ""
            print("paused", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    def put(self, name: str, buffers: Any) -> None:
        self._pause("put", name)
        super().put(name, buffers)

    def put_if_absent(self, name: str, data: Any) -> None:
        self._pause("put_if_absent", name)
        super().put_if_absent(name, data)

    def get(self, name: str, most: int | None = None) -> bytes:
        self._pause("get", name)
        return super().get(name, most)


def main() -> None:
    root = Pausing(sys.argv[1])
    place: Place = open_place(root)
    writer = Writer(place.store, 1, "paused", "m")
    root.verb, root.part = sys.argv[2:]
    try:
        writer.store("b")
    except HsxError as e:
        print(type(e).__name__)
    else:
        print("stored")


if __name__ == "__main__":
    main()
