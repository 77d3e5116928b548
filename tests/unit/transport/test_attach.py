"""The socket between an engine and the process that ships its pages: who may use it."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.errors import ConfigError
from hsx_dist.page import Page, Segment
from hsx_dist.transport import page_server
from hsx_dist.transport.attach import AttachedEnd
from hsx_dist.transport.page_server import PageServer

LAYERS, TOKENS, HIDDEN = (1, 2), 4, 8


class Writers:
    """A sender that drops its pages."""

    def send(self, pages, release):
        for page in pages:
            release(page)

    def flush(self): ...

    def close(self): ...


@pytest.fixture
def server() -> Iterator[PageServer]:
    shipped, closed = queue.Queue(), queue.Queue()
    server = PageServer(Writers, shipped.put, lambda: closed.put(True))
    server.shipped, server.ended = shipped, closed
    yield server
    server.close()


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR: expected .*, got .*xxx .*Set TMPDIR to a shorter path"):
        PageServer(Writers, print)
    assert not list(long.iterdir())


@pytest.fixture
def connect(server):
    """Function that makes outlets of an engine's ranks. They are closed after the test."""
    made: list[AttachedEnd] = []

    def connect() -> AttachedEnd:
        made.append(AttachedEnd(server.address, server.key, 1 << 20))
        return made[-1]

    yield connect
    for outlet in made:
        outlet.close(5)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no new thread")])
def test_a_server_without_resources_pauses_and_then_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    called: list[float] = []

    class Short(Listener):
        """Has no resources for the first three connections."""

        def accept(self) -> Any:
            called.append(time.monotonic())
            if len(called) <= 3:
                raise error
            return super().accept()

    monkeypatch.setattr(page_server, "Listener", Short)
    monkeypatch.setattr(page_server, "_PAUSE", 0.02)
    shipped: queue.Queue[Any] = queue.Queue()
    server = PageServer(Writers, shipped.put)
    outlet = AttachedEnd(server.address, server.key, 1 << 20)
    submit(outlet, "a")
    assert shipped.get(timeout=10).key == "a"
    outlet.close(5)
    server.close()
    assert called[3] - called[0] >= 0.06
    assert caplog.text.count("a connection to the ring was refused") == 1


def submit(outlet: AttachedEnd, *keys: str) -> None:
    pages = []
    for i, key in enumerate(keys):
        shape = (len(LAYERS), TOKENS, HIDDEN)
        offset = outlet.ring.allocate(int(np.prod(shape)) * 4)
        assert offset is not None
        segment = Segment(key, 0, 0, TOKENS, TOKENS, source=f"{key}:0")
        ids = np.arange(TOKENS, dtype=np.int64)
        ref = Page(segment, 0, TOKENS, TOKENS, LAYERS, "float32", shape, "LTH", ids, offset=offset)
        outlet.memory[offset : offset + ref.nbytes] = i + 1
        pages.append((ref, None))
    outlet.submit(*pages)


def shipped_reasons(server, n: int) -> dict[str, str | None]:
    found = [server.shipped.get(timeout=30) for _ in range(n)]
    return {shipped.key: shipped.reason for shipped in found}


class Ran:
    """Runs code where it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_data_of_unauthenticated_connections_is_not_unpickled(server, connect, tmp_path):
    with pytest.raises(AuthenticationError):
        AttachedEnd(server.address, b"a guess", 1 << 20)
    ran = tmp_path / "ran"
    for first in (lambda _: None, lambda c: c.recv_bytes()):
        # Without a key multiprocessing does not authenticate its peer. The server disconnects sooner or later.
        with suppress(EOFError, OSError), Client(server.address, "AF_UNIX") as stranger:
            first(stranger)
            while True:
                stranger.send_bytes(pickle.dumps(Ran(str(ran))))
        assert not ran.exists()
    submit(connect(), "a")
    assert shipped_reasons(server, 1) == {"a": None}
    assert server.ended.empty()  # the end of a stranger is not the end of the engine


def test_only_this_user_can_enter_the_sockets_folder(server):
    folder = Path(server.address).parent.stat()
    assert (folder.st_uid, folder.st_mode & 0o777) == (os.geteuid(), 0o700)


def test_a_silent_connection_does_not_delay_other_connections(server, connect):
    silent = [Client(server.address, "AF_UNIX") for _ in range(3)]
    submit(connect(), "a")
    assert shipped_reasons(server, 1) == {"a": None}
    for connection in silent:
        connection.close()


def test_the_key_is_hidden_where_configurations_are_shown(server):
    extra = {"hsx": {"transport": "attach", "address": "x", "output": "y", "authkey": SecretStr(server.key.hex())}}
    settings = read_connector_config(extra)
    assert bytes.fromhex(settings.authkey.get_secret_value()) == server.key
    copied = pickle.loads(pickle.dumps(extra))  # as vLLM sends it to its workers
    for shown in (repr(extra), str(extra), repr(settings), str(settings), repr(copied)):
        assert server.key.hex() not in shown
    assert len(server.key) == 32
    other = PageServer(Writers, print)
    assert other.key != server.key
    other.close()
