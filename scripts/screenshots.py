"""Take the pictures of docs/guides/watching.md: run the demo on a Ray head, and open it in Debian's Chromium.

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
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import read_complete
from hsx_dist.jobs.kit.process import end_on_sigterm
from hsx_dist.observe.report import write_report
from hsx_dist.observe.top import look
from hsx_dist.store import open_store
from tests.harness.browser import browser_page
from tests.harness.servers import RayHead, ray_head, seaweedfs

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
#: Small, so that the writer's log has several lines.
SMALL_PARTS = ("part_bytes=8MiB", "segment_bytes=8MiB")
#: Time limit for loading the engines, and for the job, on a slow machine.
PATIENCE_S = 600.0


def main() -> None:
    end_on_sigterm()
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with (
        tempfile.TemporaryDirectory(prefix="hsx-ray-") as temp,
        tempfile.TemporaryDirectory(prefix="hsx-s3-") as folder,
        # A bucket, as on a cluster, so that no picture shows a path of this machine.
        seaweedfs(folder, buckets=("states",)) as server,
        ray_head(num_cpus=2, temp_dir=temp, env={**path, **server.env}) as head,
    ):
        os.environ.update(server.env)
        output = f"{server.url}/demo"
        submit(output, {**os.environ, **path, **head.env})
        store = open_store(output)
        wait_until(head, lambda: rows_stored(store) > 0)
        with browser_page(width=1280, height=820, cookies=token(head)) as (page, _):
            shoot_running(page, head)
            wait_until(head, lambda: read_complete(open_place(store).store) is not None)
            shoot_log(page, head)
            report = Path(folder) / "report.html"
            report.write_text(write_report(store), encoding="utf-8")
            page.goto(report.as_uri())
            shoot(page, "report", bottom=page.locator("#time"))


def submit(output: str, env: dict[str, str]) -> None:
    job = ["python", "ray_jobs/extract.py", "--config", "configs/demo.yaml", f"output={output}", "check_samples=0"]
    about = json.dumps({"run": output, "job_name": "hsx demo"})
    options = ["--no-wait", "--submission-id", "hsx-demo", "--working-dir", ".", "--metadata-json", about]
    subprocess.run(["ray", "job", "submit", *options, "--", *job, *SMALL_PARTS], cwd=ROOT, env=env, check=True)


def rows_stored(store: Any) -> int:
    try:
        return int(look(store).progress.get("fates", {}).get("stored") or 0)
    except RunError:  # there is no run yet
        return 0


def token(head: RayHead) -> dict[str, tuple[str, str]]:
    """The dashboard's cookie with the cluster's token."""
    assert head.dashboard_url is not None
    return {"ray-authentication-token": (head.dashboard_url, head.token)}


def shoot_running(page: Any, head: RayHead) -> None:
    """Take the pages of the job, its actors and one actor while they are alive."""
    # First, because opening a job's page makes Ray start another actor.
    go(page, head, "actors", "/replica/0")
    shoot(page, "dashboard-actors", bottom=page.locator("table").last)
    go(page, head, f"actors/{actor_id(head, '/replica/0')}", "Tasks History")
    section(page, "Logs").click()
    section(page, "Tasks History").click()
    page.get_by_text("replica 0: task").first.wait_for(timeout=60_000)
    shoot(page, "dashboard-actor", most=1300)
    go(page, head, "jobs/hsx-demo", "User-provided metadata")
    page.get_by_text("tokens/s").first.wait_for(timeout=60_000)
    shoot(page, "dashboard-job", bottom=section(page, "Task Timeline (beta)"), inside=False)


def shoot_log(page: Any, head: RayHead) -> None:
    go(page, head, f"actors/{actor_id(head, '/writer/n0w0')}", "Tasks History")
    page.get_by_label("Keyword").fill("hsx_dist")  # hides warnings of libraries
    page.get_by_text("stored").first.wait_for(timeout=60_000)
    shoot(page, "dashboard-log", bottom=section(page, "Tasks History"), inside=False)


def go(page: Any, head: RayHead, route: str, until: str) -> None:
    page.goto(f"{head.dashboard_url}/#/{route}")
    page.get_by_text(until).first.wait_for(timeout=60_000)


def section(page: Any, title: str) -> Any:
    """The heading that folds a section. The last match, because the menu at the top has the same text."""
    return page.get_by_text(title, exact=True).last


def shoot(page: Any, name: str, *, bottom: Any = None, inside: bool = True, most: int = 1400) -> None:
    """Take the page from its top to the element ``bottom``, included if ``inside``; at most ``most`` pixels high."""
    page.wait_for_timeout(2000)  # tables load after their headings
    page.evaluate("window.scrollTo(0, 0)")  # boxes are relative to the visible area
    height = most
    if bottom is not None:
        box = bottom.bounding_box()
        assert box is not None, name
        height = min(int(box["y"] + (box["height"] if inside else 0)) + (12 if inside else -12), most)
    width = page.viewport_size["width"]
    page.screenshot(
        path=IMAGES / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height}
    )


def actor_id(head: RayHead, name: str) -> str:
    actors = ask(head, "v0/actors?limit=100&detail=true")["data"]["result"]["result"]
    return str(next(a["actor_id"] for a in actors if str(a["name"]).endswith(name)))


def ask(head: RayHead, path: str) -> Any:
    """JSON from the dashboard's REST API."""
    request = urllib.request.Request(  # noqa: S310 (loopback, and our own)
        f"{head.dashboard_url}/api/{path}", headers={"Authorization": f"Bearer {head.token}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return json.load(answer)


def wait_until(head: RayHead, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        job = ask(head, "jobs/hsx-demo")
        if job["status"] in ("FAILED", "STOPPED") or time.monotonic() > end:
            raise RuntimeError(f"expected the demo's job to finish, got status {job['status']}: {job['message']}")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
