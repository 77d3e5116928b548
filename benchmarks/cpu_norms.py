"""Register vLLM's compiled CPU kernels of the two norms. vLLM builds them, and registers such kernels for GPUs only.

vLLM's fallback on a CPU takes ten times as long, longer than the rest of the thin model.
"""

# vLLM infers the operators' schema from these annotations: they must be types, not strings.

import torch
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "cpu_kernel"


def use_cpu_norms() -> dict[str, list[str]]:
    """Register the kernels, the fused one in place as on a GPU. Returns the engine argument ``ir_op_priority``."""
    current_platform.import_kernels()
    # The kernels need a weight of the states' dtype and no ``variance_size``. Llama's layers meet both.
    ir.ops.rms_norm.register_impl(PROVIDER)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, inplace=True)(_add_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,  # noqa: ARG001
) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
