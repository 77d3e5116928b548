"""The pictures of docs/guides/watching.md, taken anew: a Ray head, the demo's job on it, Debian's Chromium.

    python scripts/screenshots.py        # or: make screenshots

Writes docs/img/dashboard-*.png and docs/img/report.png.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsx_dist.errors import RunError
from hsx_dist.format.runs import read_complete
from hsx_dist.observe.report import write_report
from hsx_dist.observe.top import look
from hsx_dist.store import open_store
from hsx_dist.testing.browser import browser_page
from hsx_dist.testing.servers import RayHead, ray_head

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
#: For the engines to load and the job to end, on a slow machine.
PATIENCE_S = 600.0


def main() -> None:
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with (
        tempfile.TemporaryDirectory(prefix="hsx-ray-") as temp,
        tempfile.TemporaryDirectory(prefix="hsx-shots-") as runs,
        ray_head(num_cpus=2, temp_dir=temp, env=path) as head,
    ):
        output = f"{runs}/demo"
        submit(output, {**os.environ, **path, **head.env})
        store = open_store(output)
        wait_until(lambda: started(store))
        with browser_page(width=1280, height=820, cookies=token(head)) as (page, _):
            shoot_dashboard(page, head)
            wait_until(lambda: read_complete(store) is not None)
            report = Path(runs) / "report.html"
            report.write_text(write_report(store), encoding="utf-8")
            page.goto(report.as_uri())
            page.screenshot(path=IMAGES / "report.png")


def submit(output: str, env: dict[str, str]) -> None:
    job = ["python", "ray_jobs/extract.py", "--config", "configs/demo.yaml", f"output={output}", "check_samples=0"]
    about = json.dumps({"run": output})
    options = ["--no-wait", "--submission-id", "hsx-demo", "--working-dir", ".", "--metadata-json", about]
    subprocess.run(["ray", "job", "submit", *options, "--", *job], cwd=ROOT, env=env, check=True)


def started(store: Any) -> bool:
    """Whether the first samples are under way."""
    try:
        return float(look(store).progress.get("tokens") or 0) > 0
    except RunError:  # there is no run yet
        return False


def token(head: RayHead) -> dict[str, tuple[str, str]]:
    """The cookie in which the dashboard's page keeps the cluster's token."""
    assert head.dashboard_url is not None
    return {"ray-authentication-token": (head.dashboard_url, head.token)}


def shoot_dashboard(page: Any, head: RayHead) -> None:
    def shoot(name: str, route: str, until: str) -> None:
        page.goto(f"{head.dashboard_url}/#/{route}")
        page.get_by_text(until).first.wait_for(timeout=60_000)
        page.wait_for_timeout(1500)  # tables fill in after their headings
        page.screenshot(path=IMAGES / f"dashboard-{name}.png")

    shoot("jobs", "jobs", "hsx-demo")
    shoot("job", "jobs/hsx-demo", "User-provided metadata")
    shoot("actors", "actors", "/replica/0")
    shoot("actor", f"actors/{actor_id(head, '/replica/0')}", "replica 0: task")


def actor_id(head: RayHead, name: str) -> str:
    request = urllib.request.Request(  # noqa: S310 (loopback, and our own)
        f"{head.dashboard_url}/api/v0/actors?limit=100&detail=true", headers={"Authorization": f"Bearer {head.token}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        actors = json.load(answer)["data"]["result"]["result"]
    return str(next(a["actor_id"] for a in actors if str(a["name"]).endswith(name)))


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("expected the demo's job to go on, it did not; look at its log on the dashboard")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
