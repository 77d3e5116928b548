"""Taps: capture any point of a model, into cache-only layers of the engine's paged cache.

================== =========================================================================
file               content
================== =========================================================================
``points``         Names, formulas and presets of points; resolves a user's choice to a ``Plan``.
``structure``      Finds the modules of a loaded model that have the points, and their widths.
``capture_config`` The choice in an engine's configuration; refuses unsupported engines.
``operator``       The operator that writes a step's rows into a paged cache and counts them.
``scatter``        The operator's copy of rows to slots.
``triton_scatter`` The CUDA kernel of that copy.
``point_cache``    The cache-only layer of a point; its backend allows full CUDA graphs.
``install``        Hooks on a loaded model, and the check that every tap runs.
================== =========================================================================

Importing this package imports neither torch nor vLLM.
"""
