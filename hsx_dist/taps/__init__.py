"""Taps: capture any point of a model, into cache-only layers of the engine's paged cache.

================== =========================================================================
file               content
================== =========================================================================
``points``         the points: names, formulas, presets; a user's choice becomes a ``Plan``
``structure``      the modules of a loaded model that have the points; widths, refusals
``capture_config`` the choice in an engine's configuration, and the engines that are refused
``operator``       one operator that writes a step's rows into a paged cache and counts them
``scatter``        its copy of rows to slots
``triton_scatter`` that copy's kernel for CUDA
``point_cache``    the cache-only layer of a point; its backend allows full CUDA graphs
``install``        hooks on a loaded model, and the check that every tap is alive
================== =========================================================================

Importing this package imports neither torch nor vLLM.
"""
