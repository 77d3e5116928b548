"""A recording replacement for the calls to ``torch.cuda`` that copies make. All calls are synchronous."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cuda", 1)


class RecordedCuda:
    """Replaces ``torch.cuda``'s functions.

    ``ended``: all work up to these event numbers has ended. ``lost``: each later call raises, as after a sticky error.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        self.devices_of_waits: list[torch.device | None] = []
        self.ended: set[int] = set()
        self.lost = False
        self._events = 0
        self._current = threading.local()
        cuda = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "copies"):
                assert device == DEVICE
                self.name = name

            def wait_event(self, event: Event) -> None:
                cuda.calls.append(f"{self.name} wait for {event.number}")

        class Event:
            def __init__(self, *, blocking: bool):
                assert blocking
                self.number = cuda._events
                cuda._events += 1

            def record(self, stream: Stream) -> None:
                cuda._check()
                cuda.calls.append(f"record {self.number} on {stream.name}")

            def query(self) -> bool:
                cuda._check()
                return self.number in cuda.ended

            def synchronize(self) -> None:
                cuda._check()
                cuda.devices_of_waits.append(getattr(cuda._current, "device", None))
                cuda.calls.append(f"wait for {self.number}")

        @contextmanager
        def stream(entered: Stream):
            cuda.calls.append(f"enter {entered.name}")
            yield
            cuda.calls.append(f"leave {entered.name}")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "model"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self._current, "device", device))

    def _check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
