"""Turning pages into parts: the sink (plain Python), a pool of threads in one process, a pool of Ray actors."""
