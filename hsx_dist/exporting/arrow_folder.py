"""The folder of a Hugging Face data set, whose Arrow files are written by exporters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_folder(new: Path, files: Sequence[str], features: Any, fingerprint: str, format_type: str | None) -> None:
    """Write ``state.json`` and ``dataset_info.json``, from which ``datasets.load_from_disk`` finds the Arrow files."""
    (new / "dataset_info.json").write_text(json.dumps({"features": features.to_dict()}))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": format_type,
        "_output_all_columns": False,
        "_split": None,
    }
    (new / "state.json").write_text(json.dumps(state))
