"""All patches of vLLM's internals, one file each. Importing this package imports nothing of vLLM.

For each file: the patched releases, the replaced code, and the effect if a vLLM release lacks that code. A warning is
logged in each of these cases; for ``loads``, an error.

- ``captures`` (0.31, 0.32, 0.33): methods of ``EagleModelMixin`` and ``SpeculativeConfig.compute_hash``. If they are
  missing, the connector refuses layer 0.
- ``cache_writes`` (0.31, 0.32, 0.33 with the V1 runner): ``ExtractHiddenStatesProposer.propose``. If it is missing,
  captured layers are not counted, and ``cache_writes: direct`` is ignored.
- ``no_drafts`` (0.31, 0.32, 0.33 with the V1 runner): a request's class. If the class lacks the attribute, vLLM
  verifies drafts again.
- ``loads`` (0.31, 0.32, 0.33): a request's ``skip_reading_prefix_cache``, while vLLM reads it. If vLLM ignores it, no
  sample is stored.
- ``resets`` (0.31, 0.32, 0.33): ``EngineCore.reset_prefix_cache``. If it is missing, a reset fails while blocks are
  held.
- ``rejections`` (0.31, 0.32, 0.33): ``EngineCore.add_request``. If it is missing, a rejected request may enter the
  engine under the id of a live request, and the engine ends.
- ``model_loads`` (0.31 with the V1 runner, 0.32, 0.33): ``BaseModelLoader.load_model``. If it is missing, an engine
  with taps is refused.

``hsx_dist/connector/versions.py`` has the differences between releases that need no patch.
"""
