"""All patches of vLLM's internals, one file each. Importing this package imports nothing of vLLM.

For each file: the patched releases, the replaced code, and the effect if vLLM no longer has it.

- ``captures`` (0.31, 0.32, 0.33): methods of ``EagleModelMixin`` and ``SpeculativeConfig.compute_hash``. Without: a
  warning; the connector refuses layer 0.
- ``cache_writes`` (0.31, 0.32, 0.33 with the V1 runner): ``ExtractHiddenStatesProposer.propose``. Without: a warning;
  captured layers are not counted, and ``cache_writes: direct`` is ignored.
- ``no_drafts`` (0.31, 0.32, 0.33 with the V1 runner): a request's class. Without: a warning; vLLM verifies drafts
  again.
- ``loads`` (0.31, 0.32, 0.33): a request's ``skip_reading_prefix_cache``, while vLLM reads it. Without: no sample is
  stored.
- ``resets`` (0.31, 0.32, 0.33): ``EngineCore.reset_prefix_cache``. Without: a warning; a reset fails while blocks are
  held.
- ``model_loads`` (0.31 with the V1 runner, 0.32, 0.33): ``BaseModelLoader.load_model``. Without: a warning; an engine
  with taps is refused.

What differs between releases without a patch is in ``hsx_dist/connector/versions.py``.
"""
