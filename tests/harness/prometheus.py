"""A real Prometheus (Debian's) on loopback that scrapes a Ray cluster, and its queries."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsx_dist.jobs.kit.process import Child, child
from tests.harness.processes import free_ports, http_status


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str
    process: Child

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The instant vector of ``expression`` at Unix time ``at`` or now: ``{"metric", "value"}`` each.

        Raises:
            ValueError: Prometheus refuses the expression. Carries Prometheus's message.
        """
        parameters = {"query": expression, **({"time": f"{at:.3f}"} if at is not None else {})}
        answer = self._get(f"/api/v1/query?{urllib.parse.urlencode(parameters)}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def query_range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        """The values of ``expression`` between two Unix times: ``{"metric", "values"}`` of every series with values.

        Raises:
            ValueError: as ``query``.
        """
        parameters = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        answer = self._get(f"/api/v1/query_range?{urllib.parse.urlencode(parameters)}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The loaded alerting rules: ``{"name", "health", "lastError", …}`` each."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # use no proxy for loopback
        try:
            with opener.open(self.url + path, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            raise ValueError(f"{path}: {e.read().decode(errors='replace')}") from e


def prometheus_program() -> str | None:
    """The path of ``prometheus``, None if it is not installed."""
    return shutil.which("prometheus")


@contextmanager
def prometheus(folder: Path, service_discovery: Path, rules: Path | None = None) -> Iterator[Prometheus]:
    """Start Prometheus. Every second it scrapes the targets in Ray's ``prom_metrics_service_discovery.json``.

    Data and log are written to ``folder``.
    """
    found = prometheus_program()
    if found is None:
        raise FileNotFoundError("expected prometheus on PATH, got none. Run apt-get install prometheus.")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "2s"},
        "rule_files": [str(rules)] if rules is not None else [],
        "scrape_configs": [
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": [str(service_discovery)], "refresh_interval": "1s"}],
            }
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    (port,) = free_ports(1)
    argv = [
        found,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with child(argv, log=folder / "prometheus.log") as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_until(lambda: http_status(f"{url}/-/ready") == 200, 60)
        yield Prometheus(url, process)
