"""The stored objects: codecs, the container, receipts and the manifest."""
