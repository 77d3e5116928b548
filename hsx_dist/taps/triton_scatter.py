"""The operator's CUDA kernel, with one launch per tap. CUDA graphs can replay it, since the kernel reads the slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows that one program copies, and elements of a row that it copies at once.
_ROWS = 4
_COLUMNS = 1024


# Triton compiles the parameters' annotations too. A name that it does not know, such as Any, is an error on a GPU only.
@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    slots,
    cache,
    count,
    n,
    width,
    block,
    x_stride,
    block_stride,
    token_stride,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row, mask=row < n, other=-1).to(tl.int64)
    valid = slot >= 0
    target = (slot // block) * block_stride + (slot % block) * token_stride
    mask = valid[:, None] & (column < width)[None, :]
    source = row.to(tl.int64) * x_stride
    values = tl.load(x + source[:, None] + column[None, :], mask=mask)
    tl.store(cache + target[:, None] + column[None, :], values.to(cache.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0:
        tl.atomic_add(count + 1, tl.sum(valid.to(tl.int64)))
        if tl.program_id(0) == 0:
            tl.atomic_add(count, 1)


def scatter_triton(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> None:
    """Run ``scatter.scatter`` as one kernel. ``x`` and ``slots`` have equal length, above 0."""
    n, width = x.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _kernel[(triton.cdiv(n, _ROWS), triton.cdiv(width, columns))](
        x,
        slots,
        cache,
        count,
        n,
        width,
        cache.shape[1],
        x.stride(0),
        cache.stride(0),
        cache.stride(1),
        ROWS=_ROWS,
        COLUMNS=columns,
    )
