"""Every point of SmolLM2-135M's first, middle and last layer against transformers with hooks, in float32.

    .venv/bin/python -m tests.soak.smollm2_points

Runs the check of ``hsx doctor --engine`` with the built-in model on the CPU, and prints a line for each point. The exit
status is 1 unless each point is captured, compared, equal within the limit, and different when its rows are shifted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.connector import plugin
from hsx_dist.jobs.doctor_engine import diagnose
from hsx_dist.taps.points import HIDDEN_STATES, POINTS, PRESETS

LAYERS = [0, 15, -1]
#: SmolLM2 has neither norms of heads nor a router.
LACKING = {"q_norm", "k_norm", "router_logits", "topk_ids", "topk_weights"}


def capture() -> dict[str, Any]:
    """The points of the preset ``full`` and ``hidden_states``, of three layers."""
    names = [name for name in (HIDDEN_STATES, *PRESETS["full"]) if name not in LACKING]
    return {"points": {name: LAYERS if POINTS[name].per_layer else "all" for name in names}}


def main() -> None:
    plugin.register()
    points = capture()
    with tempfile.TemporaryDirectory(prefix="hsx-smollm2-") as folder:
        config = ExtractConfig(
            model="builtin:smollm2-135m-instruct",
            output=str(Path(folder) / "run"),
            pool="threads",
            source="taps",
            capture=points,
            engine_kwargs={"dtype": "float32", "enforce_eager": True, "max_model_len": 512},
        )
        found = diagnose(config)
    for one in found:
        print(f"{one.state}  {one.name}: {one.message}", flush=True)
    expected = [f"point {name}" for name in points["points"]]
    if [one.name for one in found if one.state == "ok"] != expected:
        raise SystemExit(f"expected all of {', '.join(expected)} to be ok, got others. See above")


if __name__ == "__main__":
    main()
