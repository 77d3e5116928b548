"""Taps: capture any point of a model, into cache-only layers of the engine's paged cache.

============= ==========================================================================================
file          content
============= ==========================================================================================
``points``    the points: names, formulas, presets; a user's choice becomes a ``Plan``
``structure`` the modules of a loaded model that have the points; widths, dtypes, refusals
``limits``    the engine configurations that are refused
``operator``  one operator that writes a step's rows into a paged cache and counts them
``triton_scatter``  the operator's kernel for CUDA
``cache``     the cache-only layer of a point, and its backend, which allows full CUDA graphs
``install``   hooks on a loaded model, and the check that every tap is alive
============= ==========================================================================================

Importing this package imports neither torch nor vLLM.
"""
