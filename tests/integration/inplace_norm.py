"""vLLM's fused norm working in place, as vLLM's GPU kernel does. No operator of its CPU build does."""

# vLLM infers the operator's schema from these annotations: they must be types, not strings.

import torch

PROVIDER = "in_place"


def use_inplace_norm() -> dict[str, list[str]]:
    """Register the operator. Returns the engine's ``ir_op_priority`` that selects it."""
    from vllm import ir

    if PROVIDER not in ir.ops.fused_add_rms_norm.impls:
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, inplace=True)(_add_norm)
    return {"fused_add_rms_norm": [PROVIDER]}


def _add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert weight is not None
    assert variance_size is None
    x_residual.add_(x)
    x.copy_(x_residual * torch.rsqrt(x_residual.pow(2).mean(-1, keepdim=True) + epsilon) * weight)
    return x, x_residual
