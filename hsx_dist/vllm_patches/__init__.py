"""All patches of vLLM's internals, one file each. Importing this package imports nothing of vLLM.

================ ==================== ============================ ==========================================
file             vLLM                 replaces                     if vLLM no longer has it
================ ==================== ============================ ==========================================
``captures``     0.31, 0.32, 0.33     methods of                   a warning; the connector refuses layer 0
                                      ``EagleModelMixin``,
                                      ``SpeculativeConfig
                                      .compute_hash``
``cache_writes`` 0.31, 0.32, 0.33     ``ExtractHiddenStates        a warning; captured layers are not counted,
                 (V1 runner)          Proposer.propose``           ``cache_writes: direct`` is ignored
``no_drafts``    0.31, 0.32, 0.33     a request's class            a warning; vLLM verifies drafts again
                 (V1 runner)
``loads``        0.31, 0.32, 0.33     a request's                  no sample is stored
                                      ``skip_reading_prefix_
                                      cache``, while vLLM reads it
``resets``       0.31, 0.32, 0.33     ``EngineCore                 a warning; a reset fails while blocks are held
                                      .reset_prefix_cache``
``model_loads``  0.32                 ``BaseModelLoader            a warning; an engine with taps is refused
                                      .load_model``
================ ==================== ============================ ==========================================

What differs between releases without a patch is in ``hsx_dist/connector/versions.py``.
"""
