"""Rows in, receipts out: what drives replicas and writers through one run."""
