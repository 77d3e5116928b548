"""A Ray head for tests and demos. Other Ray clusters may run on the same machine.

The dashboard listens on loopback. Ray's other services listen on every interface, and no option changes that: token
authentication protects them.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hsx_dist.jobs.kit.process import Child, StartFailed, child
from tests.harness.processes import free_ports, http_status, program

_LONGEST = 40  # Ray's Unix sockets are below it, and a socket's path may have 107 characters
_TRIES = 3  # another process may bind a chosen port before Ray does


@dataclass(frozen=True)
class RayHead:
    """A running Ray head node."""

    address: str  #: for ``ray.init(address=…)``, ``127.0.0.1:PORT``
    dashboard_url: str | None
    token_path: Path
    temp_dir: Path
    process: Child

    @property
    def token(self) -> str:
        """The token for the dashboard's REST API, ``Authorization: Bearer …``."""
        return self.token_path.read_text()

    @property
    def env(self) -> dict[str, str]:
        """Environment of processes that use this cluster by ``ray.init()`` or ``ray job submit``."""
        env = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
        }
        return {**env, "RAY_API_SERVER_ADDRESS": self.dashboard_url} if self.dashboard_url else env


@contextmanager
def ray_head(
    *,
    num_cpus: int = 2,
    temp_dir: Path | str | None = None,
    dashboard: bool = True,
    env: Mapping[str, str] | None = None,
    object_store_memory: int = 512 << 20,
) -> Iterator[RayHead]:
    """Start a Ray head with token authentication on free ports. On exit it and all its workers have ended.

    Args:
        temp_dir: folder of Ray's sockets and logs, at most 40 characters. Default: a new folder, removed on exit.
        env: environment variables of every process of the cluster.
        object_store_memory: bytes.
    """
    own = temp_dir is None
    folder = Path(tempfile.mkdtemp(prefix="ray-") if temp_dir is None else temp_dir).resolve()
    try:
        if len(str(folder)) > _LONGEST:
            raise ValueError(
                f"expected a temp_dir of at most {_LONGEST} characters (for Ray's Unix sockets), got {folder}. "
                "Leave it out, or set TMPDIR to a shorter path."
            )
        folder.mkdir(parents=True, exist_ok=True)
        token_path = folder / "auth-token"
        token_path.touch(mode=0o600)
        token_path.write_text(secrets.token_hex(32))
        yield from _head(folder, token_path, num_cpus, dashboard, dict(env or {}), object_store_memory)
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)


def _head(
    folder: Path, token_path: Path, num_cpus: int, dashboard: bool, env: dict[str, str], memory: int
) -> Iterator[RayHead]:
    variables = {
        **env,
        "RAY_ADDRESS": None,
        "RAY_API_SERVER_ADDRESS": None,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
    }
    for attempt in range(_TRIES):
        ports = free_ports(4)
        argv = _ray_command(folder, ports, num_cpus, dashboard, memory)
        log = folder / "ray-start.log"
        log.unlink(missing_ok=True)
        with child(argv, log=log, env=variables) as process:
            url = f"http://127.0.0.1:{ports[1]}" if dashboard else None
            head = RayHead(f"127.0.0.1:{ports[0]}", url, token_path, folder, process)
            try:
                process.wait_until(lambda head=head: _is_up(head), 90)  # type: ignore[misc]
                yield head
                return
            except StartFailed:
                if attempt == _TRIES - 1 or process.process.poll() is None:
                    raise
            finally:
                process.terminate(10)


def _is_up(head: RayHead) -> bool:
    if "Ray runtime started" not in head.process.log.read_text(errors="replace"):
        return False
    if head.dashboard_url is None:
        return True
    return http_status(f"{head.dashboard_url}/api/version", {"Authorization": f"Bearer {head.token}"}) == 200


def _ray_command(folder: Path, ports: list[int], num_cpus: int, dashboard: bool, memory: int) -> list[str]:
    names = ["port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port"]
    return [
        program("ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--include-dashboard={dashboard}",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={memory}",
        f"--temp-dir={folder}",
        # Workers bind to ports from the kernel: Ray's fixed range is the same for every cluster.
        "--min-worker-port=0",
        "--max-worker-port=0",
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
    ]
