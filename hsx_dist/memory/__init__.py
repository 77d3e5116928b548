"""Host memory: shared mappings, huge pages, reused blocks, advice to the kernel."""
