"""Taps in vLLM's own compile mode: a first start, a second one from the compile cache, and another choice of points.

    .venv/bin/python -m tests.soak.compiled_taps

Each start is a separate process with a tiny model on the CPU, where vLLM by default disables its compile mode. The rows
of each start are compared with transformers. vLLM's counters show the compiled and the loaded graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hsx_dist
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row
from tests.integration.exact import prompts

#: With the last layer and ``resid_final``: no later operation in the graph reads them.
FIRST = {"hidden_states": [0, 5], "q": [1, 4], "mlp_out": [4], "resid_final": "all", "topk_ids": [2]}
OTHER = {"hidden_states": [0, 5], "q": [0, 3], "z": [1], "mlp_out": [4], "resid_final": "all"}
TOLERANCE = 2e-5  # relative to a row's norm


def compile_on_cpu() -> None:
    """Keep vLLM's compile mode, which vLLM's CPU platform turns off."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        theirs(vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        vllm_config.compilation_config.compile_sizes = []

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    FixFunctionalizationPass.__call__ = lambda *_: None  # it refers to CUDA operators


def start(folder: Path, name: str, points: dict[str, Any]) -> dict[str, int]:
    """Run a job in this process, and compare its rows. Returns vLLM's counters.

    Raises:
        AssertionError: a row differs.
    """
    from vllm.compilation.counter import compilation_counter

    from hsx_dist.connector import plugin

    plugin.register()
    compile_on_cpu()
    rows = {f"row-{len(ids)}": ids for ids in prompts(21, 1, 31, 33, 100, 150)}
    run = hsx_dist.extract(
        [{"id": key, "token_ids": ids} for key, ids in rows.items()],
        model=str(folder / "model"),
        output=folder / name,
        engine_kwargs={"dtype": "float32", "block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 64},
        source="taps",
        capture={"points": points},
    )
    hooked, worst = HookedModel(folder / "model"), 0.0
    for key, ids in rows.items():
        right, sample = hooked.rows(ids), run[key]
        assert set(sample.points) == set(points)
        for point, stored in sample.points.items():
            for layer in stored.layers:
                error = worst_row(sample.point(point, layer), right[point, layer])
                assert error < TOLERANCE, (name, key, point, layer, error)
                worst = max(worst, error)
    print(f"{name}: {len(rows)} samples, worst row {worst:.1e}", flush=True)
    return {name: value for name, value in vars(compilation_counter).items() if value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", nargs=3, metavar=("FOLDER", "NAME", "POINTS"), help="one start, in this process")
    given = parser.parse_args().start
    if given:
        print(json.dumps(start(Path(given[0]), given[1], json.loads(given[2]))))
        return
    with tempfile.TemporaryDirectory(prefix="hsx-compiled-") as name:
        folder, found = Path(name), {}
        from hsx_dist.models.tiny import write_tiny_tokenizer

        write_tiny_tokenizer(tiny_model("qwen3_moe", folder / "model"), 512, 512)
        for which, points in (("first", FIRST), ("second", FIRST), ("other", OTHER)):
            command = [sys.executable, "-m", "tests.soak.compiled_taps", "--start", name, which, json.dumps(points)]
            env = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
            (said,) = (
                line for line in done.stdout.splitlines() if line.startswith(f"{which}: ")
            )  # vLLM also logs to standard output
            (counters,) = (line for line in done.stdout.splitlines() if line.startswith('{"num_'))
            found[which] = json.loads(counters)
            print(said, {n: v for n, v in found[which].items() if "compile" in n or "aot" in n}, flush=True)
        compiled = {which: counted.get("num_aot_compiles", 0) for which, counted in found.items()}
        loaded = {which: counted.get("num_aot_artifacts_loaded", 0) for which, counted in found.items()}
        if not (compiled["first"] and compiled["other"] and loaded["second"] and not compiled["second"]):
            raise SystemExit(f"expected compilations, then a load, then compilations, got {compiled} and {loaded}")
    print("compiled, loaded from the cache, and compiled again for other points. Every row equals the model's.")


if __name__ == "__main__":
    main()
