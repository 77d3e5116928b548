"""Run the demo on this machine: start a Ray head, and submit the extraction as a Ray job.

    python scripts/demo.py [--s3] [key.sub=value …]

If RAY_ADDRESS names a cluster, the job is submitted there. ``--s3`` starts a local S3 server (SeaweedFS) and stores the
run there. At the end a report is written to runs/demo-report.html.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hsx_dist.jobs.kit.process import end_on_sigterm
from tests.harness.servers import ray_head, seaweedfs

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "runs" / "demo-report.html"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the demo as a submitted Ray job.")
    parser.add_argument("--s3", action="store_true", help="store in SeaweedFS instead of runs/demo")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override settings of configs/demo.yaml")
    arguments = parser.parse_args()
    end_on_sigterm()
    # The job runs in a copy of the working folder, so its output path must be absolute.
    settings = [f"output={ROOT / 'runs' / 'demo'}"]
    # The job and the workers must use this Python.
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with ExitStack() as stack:
        if arguments.s3:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-s3-"))
            server = stack.enter_context(seaweedfs(folder))
            settings = [
                f"output={server.url}/demo",
                f"store.storage_options.client_kwargs.endpoint_url={server.endpoint_url}",
            ]
            # Credentials are passed in the environment. `ray job list` would show them on the command line.
            env.update(server.env)
        if "RAY_ADDRESS" not in os.environ:
            print("starting a Ray head on this machine", flush=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-ray-"))
            head = stack.enter_context(ray_head(num_cpus=os.cpu_count() or 2, temp_dir=folder, env=env))
            env.update(head.env)
            print(f"dashboard: {head.dashboard_url}", flush=True)
        job = ["python", "ray_jobs/extract.py", "--config", "configs/demo.yaml", *settings, *arguments.overrides]
        output = next(s for s in reversed(job) if s.startswith("output=")).removeprefix("output=")
        about = json.dumps({"run": output, "job_name": "hsx demo"})  # shown on the job's page of Ray's dashboard
        command = ["ray", "job", "submit", "--working-dir", ".", "--metadata-json", about, "--", *job]
        print(f"$ {' '.join(command)}", flush=True)
        env = {**os.environ, **env}
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        if status == 0:
            print(f"$ hsx report {output} -o {REPORT.relative_to(ROOT)}", flush=True)
            REPORT.parent.mkdir(exist_ok=True)
            report = [sys.executable, "-m", "hsx_dist.cli", "report", output, "-o", str(REPORT)]
            status = subprocess.run(report, cwd=ROOT, env=env, check=False).returncode
            print(f"open {REPORT.as_uri()}", flush=True)
        return status


if __name__ == "__main__":
    sys.exit(main())
