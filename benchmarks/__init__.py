"""Benchmarks: each is a program. Their results, with hardware and commit, are in results/."""
