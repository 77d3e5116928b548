"""What a stored object is: codecs, the container, receipts and the manifest."""
