"""What needs a CUDA machine and nothing else: torch and this checkout, neither vLLM nor a network."""
