"""Real servers on loopback for tests and demos: S3 (SeaweedFS), GCS (fake-gcs-server), a Ray head.

Each is a context manager; it chooses free ports, so several run side by side, and ends what it started by process id.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hsx_dist.testing.processes import Child, StartFailed, child, free_ports, program

_REGION = "us-east-1"
_GRPC = 10000  # SeaweedFS's parts look for each other's gRPC port there, whatever the flags say
_TRIES = 3  # another process may take a port between the choice and the start


@dataclass(frozen=True)
class S3Identity:
    """One key pair of an S3 server."""

    endpoint_url: str
    access_key: str
    secret_key: str

    @property
    def storage_options(self) -> dict[str, Any]:
        """For fsspec and s3fs."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": _REGION},
        }

    @property
    def env(self) -> dict[str, str]:
        """For clients that look at the environment."""
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
    """A running SeaweedFS; the fields are those of the identity that may do everything."""

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

    The ``buckets`` exist when it is entered; any other bucket is missing, and stays so.
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
                process.kill()  # a polite end takes SeaweedFS up to 14 s
                _remove_sockets(ports)
            return


def _identity(access_key: str, secret_key: str, writes: bool) -> dict[str, Any]:
    actions = ["Admin", "Read", "Write", "List", "Tagging"] if writes else ["Read", "List"]
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    return {"name": "admin" if writes else "read-only", "credentials": credentials, "actions": actions}


def _weed_command(directory: Path, config: Path, ports: Sequence[int], buckets: Sequence[str]) -> list[str]:
    # Every port is named: what is left out takes a default, and clashes with a neighbour.
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
    if _status(f"http://127.0.0.1:{s3}/") is None:
        return False
    return all(_status(f"http://127.0.0.1:{filer}/buckets/{name}/") == 200 for name in buckets)


def _remove_sockets(ports: Sequence[int]) -> None:
    for port in (p + offset for p in ports for offset in (0, _GRPC)):
        for path in Path(gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


def _status(url: str) -> int | None:
    """The HTTP status of a GET; None when nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy
    try:
        with opener.open(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return None
