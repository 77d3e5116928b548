"""Where a sample stores the residual stream, and the hooks of SAELens and TransformerLens."""

from __future__ import annotations

from hsx_dist.errors import ConfigError
from hsx_dist.format.description import described_layers
from hsx_dist.layers import point_of_hook
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample


def stream_place(sample: Sample, layer: int, num_layers: int | None = None) -> tuple[str, int]:
    """Return the point and layer under which ``sample`` stores a layer of the residual stream.

    The point is ``hidden_states`` if the sample has it, unless only the alternative has the layer. The alternative has
    the same rows: ``resid_final`` for the model's last layer, else ``resid_pre``. The sample may lack the returned
    layer.

    Args:
        layer: vLLM's id, 0 (the embeddings) to the model's number of layers.
        num_layers: the model's number of layers. Default: as recorded in the sample.
    """
    last = described_layers(sample.about) if num_layers is None else num_layers
    point, own = ("resid_final", 0) if layer == last else ("resid_pre", layer)
    stored = {name: of.layers for name, of in sample.points.items()}
    if HIDDEN_STATES not in stored or (layer not in stored[HIDDEN_STATES] and own in stored.get(point, ())):
        return point, own
    return HIDDEN_STATES, layer


def hook_place(run: Run, hook: str) -> tuple[str, int]:
    """Return the point and layer in which the samples of ``run`` store a hook, such as ``blocks.3.hook_mlp_out``.

    Raises:
        ConfigError: no point matches the hook, the run's first sample lacks the point or layer, or there is no sample.
    """
    point, layer = point_of_hook(hook)
    stored = {}
    if len(run):
        sample = run.at(0)
        stored = {name: list(of.layers) for name, of in sample.points.items()}
        if point == HIDDEN_STATES:
            point, layer = stream_place(sample, layer)
    if layer not in stored.get(point, ()):
        got = stored.get(point) or f"none of this point; the run has {', '.join(stored) or 'no samples'}"
        raise ConfigError(
            f"{run.url}: expected layer {layer} of {point} ({hook}), got {got}. Extract it, or name another hook"
        )
    return point, layer
