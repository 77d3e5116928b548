"""Helpers that start servers: free ports, paths of programs, and a check whether an address answers."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from hsx_dist.jobs.kit.process import StartFailed

# Locked files of the ports that this process got. They stay open until the process ends.
_reserved: list[int] = []


def free_ports(n: int, *, twin: int = 0) -> list[int]:
    """``n`` different unused TCP ports, outside the range of outgoing connections.

    With ``twin``, each port plus ``twin`` is free too. No other process of the tests gets these ports: a server binds
    its port some time later, and several of vLLM's servers can bind the same one.
    """
    found: list[int] = []
    # vLLM seeds the random numbers of a process, so two processes of the tests would draw the same ports.
    for port in random.SystemRandom().sample(range(10100, 20000), k=4000):
        if all(_is_free(p) and _reserve(p) for p in {port, port + twin}):
            found.append(port)
        if len(found) == n:
            return found
    raise StartFailed(f"expected {n} free ports in 10100-20000, got {len(found)}. End processes that listen there.")


def _reserve(port: int) -> bool:
    """Lock the file of ``port`` until this process ends. False if a process has it."""
    folder = Path(tempfile.gettempdir(), f"hsx-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    _reserved.append(fd)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def program(name: str) -> str:
    """The path of an executable. The running interpreter's environment is searched first."""
    here = Path(sys.executable).with_name(name)
    path = str(here) if here.exists() else shutil.which(name)
    if path is None:
        raise StartFailed(
            f"expected the program {name!r} next to {sys.executable} or on PATH, got none. Run make setup."
        )
    return path


def http_status(url: str, headers: Mapping[str, str] | None = None) -> int | None:
    """The HTTP status of a GET, None without an answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # use no proxy for loopback
    try:
        with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return None
