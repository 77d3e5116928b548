"""Shared fixtures. Models and servers are made once per session, and only if a test requests them."""

from __future__ import annotations

import functools
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.servers import GcsServer, RayHead, S3Server, fake_gcs, ray_head, seaweedfs

# vLLM reads these on import: a small cache (GiB), few log lines.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# By default Ray's workers have the niceness 15. On a loaded machine their engines would take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tests use no model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# No deadline: on a loaded machine one example may take seconds.
settings.register_profile("loaded machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded machine")

#: Programs that are no Python packages, and how to install them. Their tests are skipped if they are missing.
PROGRAMS = {
    "chromium": "apt-get install chromium",
    "prometheus": "apt-get install prometheus",
}


# Each botocore session parses several MB of descriptions of services, which takes 0.2 s. Sessions share them in tests.
with suppress(ImportError):  # the trainers' environment has no botocore
    import botocore.session

    botocore.session.create_loader = functools.cache(botocore.session.create_loader)

_TRACED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests that trace memory to the end: their processes are slower from then on."""
    items.sort(key=lambda item: item.get_closest_marker("traced") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_TRACED] = tracemalloc.is_tracing()
    return (yield)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail if a test without the mark ``traced`` begins to trace: later tests would be slow, and forks may hang."""
    begun = tracemalloc.is_tracing() and not item.stash[_TRACED]
    if begun and item.get_closest_marker("traced") is None:
        pytest.fail(f"expected the mark `traced`, because {item.name} traces memory; got none. Mark it")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were skipped because a program is missing, and how to install it."""
    skipped = terminalreporter.stats.get("skipped", [])
    for program, command in PROGRAMS.items():
        names = sorted({r.nodeid for r in skipped if isinstance(r.longrepr, tuple) and command in str(r.longrepr[2])})
        if names:
            terminalreporter.section(f"left out, as {program} is missing ({command})", sep="-")
            for name in names:
                terminalreporter.line(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bf16, from the user's cache."""
    from hsx_dist.models.builtin import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers, hidden size 64, two heads, 512 positions, in float32."""
    from hsx_dist.models.tiny import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", kv_heads=2)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server (SeaweedFS) on loopback, with the bucket ``hsx``."""
    with seaweedfs(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A GCS server (fake-gcs-server) on loopback, with the bucket ``hsx``. gcsfs's environment variables are set."""
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def ray_cluster(s3: S3Server) -> Iterator[RayHead]:
    """A Ray head with two CPUs. Its processes use this interpreter and ``s3`` with its credentials."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ray_head(num_cpus=2, env={**s3.env, "PATH": path}) as head:
        yield head


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch with one thread. On shared cores, several threads wait for each other in every matrix product."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
