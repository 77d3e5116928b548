"""Extract hidden states as a Ray job:

ray job submit --working-dir . -- python ray_jobs/extract.py --config configs/demo.yaml [key.sub=value …]
"""

from hsx_dist.cli.extract import job_main

if __name__ == "__main__":
    job_main()
