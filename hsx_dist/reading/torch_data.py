"""What the data sets need of ``torch.utils.data``: ``DataLoader`` recognizes only subclasses of torch's classes.

Without torch the classes are ``object``. The data sets then return NumPy arrays, in loops without a ``DataLoader``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
else:
    Dataset = IterableDataset = object

    def get_worker_info() -> Any:
        return None


__all__ = ["Dataset", "IterableDataset", "get_worker_info"]
