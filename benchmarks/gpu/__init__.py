"""Measurements on a CUDA machine, and the kit that `make gpu` runs."""
