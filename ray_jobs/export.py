"""Write a run in a trainer's file format, as Ray tasks. Accepts the arguments of ``hsx export``:

ray job submit --working-dir . -- python ray_jobs/export.py s3://bucket/run /shared/states --to speculators
"""

import sys

from hsx_dist.cli import main

if __name__ == "__main__":
    main(["export", "--ray", *sys.argv[1:]])
