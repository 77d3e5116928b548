"""Read a whole run and check every checksum and count. As a Ray job it runs near the store:

ray job submit --working-dir . -- python ray_jobs/verify.py --config configs/demo.yaml [key.sub=value …]
"""

from hsx_dist.cli.verify import job_main

if __name__ == "__main__":
    job_main()
