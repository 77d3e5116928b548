"""Switch captures on and off between windows, within an engine's process. For an eager engine on the V1 runner.

Two processes of one cell differ, for their whole life, by more than a capture costs. Two windows of one engine differ
only in the switched captures. A capture that is off costs nothing: the taps' hooks are removed from the modules, the
model returns no captured layers, and the runner does not call its drafter.
"""

from __future__ import annotations

from typing import Any

#: For each mode: whether taps run, how vLLM's extraction writes (None: off), and whether requests ask for states.
MODES: dict[str, tuple[bool, str | None, bool]] = {
    "none": (False, None, False),
    "null": (False, "vllm", False),
    "file": (False, "vllm", True),
    "direct-cache": (False, "direct", False),
    "taps-cache": (True, None, False),
    "taps-sink": (True, None, True),
    "taps": (True, None, True),
}


class Toggles:
    """The switches of an engine. All captures are on at first."""

    def __init__(self, engine: Any):
        core = engine.engine_core.engine_core
        self._config = engine.vllm_config
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.get_model()
        self._speculation = self._runner.speculative_config
        self._drafted = 0
        if self._speculation is not None:
            drafter = self._runner.drafter
            self._layers = tuple(drafter.hf_config.eagle_aux_hidden_state_layer_ids)
            propose = drafter.propose

            def counted(*args: Any, **kwargs: Any) -> Any:
                self._drafted += len(kwargs["target_hidden_states"][0])
                return propose(*args, **kwargs)

            drafter.propose = counted
        for layer in self._config.compilation_config.static_forward_context.values():
            layer.kv_cache.fill_(0)  # otherwise the first windows pay for page faults
        self.taps = getattr(self._model, "hsx_taps", None)
        tables = [t for m in self._model.modules() for t in (m._forward_hooks, m._forward_pre_hooks)]
        found = [(t, {k: h for k, h in t.items() if h.__module__ == "hsx_dist.taps.install"}) for t in tables]
        self._hooks = [(table, ours) for table, ours in found if ours]
        self.mode = ""

    def switch(self, mode: str) -> bool:
        """Switch captures to ``mode`` from the next step on. Returns whether requests must ask for states."""
        tapped, extraction, asks = MODES[mode]
        self.mode = mode
        for table, ours in self._hooks:
            for key in ours:
                table.pop(key, None)
            if tapped:
                table.update(ours)
        if self._speculation is not None:
            self._runner.speculative_config = self._speculation if extraction else None
            self._runner.use_aux_hidden_state_outputs = bool(extraction)
            self._model.set_aux_hidden_state_layers(self._layers if extraction else ())
            if extraction:
                self._write(direct=extraction == "direct")
        return asks

    def _write(self, *, direct: bool) -> None:
        from hsx_dist.vllm_patches.cache_writes import watch

        layer = self._config.compilation_config.static_forward_context[self._runner.drafter.attn_layer_names[0]]
        cache = layer.kv_cache
        watch(layer, cache, tuple(sorted(self._layers)), self._config, direct=direct)

    def captured(self) -> tuple[int, int]:
        """Rows that each tap has written so far, and rows that vLLM's extraction has received."""
        return (self.taps.check_alive() if self.taps is not None else 0), self._drafted

    def check(self, before: tuple[int, int], tokens: int) -> None:
        """Check that a window of ``tokens`` captured exactly the rows of its mode.

        Raises:
            RuntimeError: it captured other rows, so its figures are invalid.
        """
        tapped, extraction, _ = MODES[self.mode]
        expected = (tokens * tapped, tokens * (extraction is not None))
        found = tuple(now - then for now, then in zip(self.captured(), before, strict=True))
        if found != expected:
            raise RuntimeError(f"{self.mode}: expected {expected} rows of taps and of extraction, got {found}")
