"""A Triton backend that makes vLLM's CPU build use Triton, whose kernels ``TRITON_INTERPRET=1`` then interprets.

Triton looks for a backend's classes in the modules ``compiler`` and ``driver`` of the package that its entry point
names. The interpreter calls neither class.
"""
